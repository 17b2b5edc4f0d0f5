"""README and the pages: the files that they name exist, and README stays a page. `test_docs.py` runs their commands."""

import re

import pytest
from docs_page import PAGES, ROOT

TEXTS = {page: (ROOT / page).read_text() for page in PAGES}
# Paths of a run, of a user's package and of the user's project, and of other trainers, which the checkout does not have.
OF_USERS = re.compile(
    r"runs/|my_pkg/|text/|replay/|summaries/|decode_out/|eval_out/|best/|logs/|checkpoints/|site/|benchmarks/results/|configs/"
)
# Pages that name other projects' files.
OF_OTHERS = ("docs/coming_from_t5x.md", "docs/coming_from_maxtext.md", "docs/coming_from_flax.md")
OURS = [text for page, text in TEXTS.items() if page not in OF_OTHERS]
NAMES = sorted(
    {name for text in OURS for name in re.findall(r"`([\w./]+(?:/|\.py))`", text) if not OF_USERS.match(name)}
)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_a_page_names_exists(name):
    assert any((folder / name).exists() for folder in (ROOT, ROOT / "spmd_trainer", ROOT / "tools/launch"))


def test_pages_name_files():
    assert {"step/step_fns.py", "tests/golden/", "benchmarks/plan_baseline.py"} <= set(NAMES)


def test_readme_is_a_page():
    assert len(TEXTS["README.md"].splitlines()) <= 130


def test_readme_links_to_every_part_of_the_documentation():
    linked = set(re.findall(r"\]\((docs/\w+\.md)\)", TEXTS["README.md"]))
    # The home page is README's counterpart; README's last section links to the limits.
    assert linked == set(PAGES) - {"README.md", "docs/index.md"}
