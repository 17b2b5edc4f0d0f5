"""How many requests a run's start and its checkpoints take, counted by a proxy."""

import pytest
from etils import epath
from proxy import Proxy
from test_runs import succeed
from tiny_steps import restored, save

from spmd_trainer.checkpointing import Checkpointer

# Written just before the training loop begins; everything before is the start.
LAST_OF_START = "sharding_report.html"
MOST_AT_START, MOST_AT_RESUME = 20, 70
# Taking the lock. Heartbeats and the log take some every few seconds, however long a start takes.
LOCK = 2


def requests_of_start(proxy, *args, **kwargs):
    proxy.requests.clear()
    succeed(*args, **kwargs)
    requests = list(proxy.requests)
    end = next(n for n, (method, path) in enumerate(requests, 1) if method in ("PUT", "POST") and LAST_OF_START in path)
    paths = [
        path
        for _, path in requests[:end]
        if not any(f"requests{sep}{name}" in path for sep in ("/", "%2F") for name in ("lock", "logs"))
    ]
    # TensorStore reads a file's arrays in one request or in several, as they happen to come together.
    of_arrays = {path.partition("&tensorstore=")[0] for path in paths if "&tensorstore=" in path}
    return [*(path for path in paths if "&tensorstore=" not in path), *sorted(of_arrays)]


@pytest.mark.parametrize("scheme", ["gs", pytest.param("s3", marks=pytest.mark.full)])
@pytest.mark.full
def test_a_start_and_a_resume_take_few_requests(scheme, address_of, use, tmp_path):
    """A start took 36 on S3, and a resume 233 on GCS."""
    directory = f"{scheme}://bkt/requests"
    with Proxy(address_of(scheme)) as proxy:
        environment = use(scheme, proxy.address)
        start = requests_of_start(proxy, directory, environment, steps=1, cwd=tmp_path)
        resume = requests_of_start(proxy, directory, environment, steps=2, cwd=tmp_path)
    assert LOCK + len(start) <= MOST_AT_START, start
    assert LOCK + len(resume) <= MOST_AT_RESUME, resume


def requests_with(number, scheme, proxy):
    """The number of requests of each question to a directory with this number of steps."""

    def asked(ask):
        proxy.requests.clear()
        ask()
        return len(proxy.requests)

    directory = epath.Path(f"{scheme}://bkt/kept{number}")
    with Checkpointer(directory) as checkpoints:
        save(checkpoints, *range(1, number + 1))
    with Checkpointer(directory, save_interval_steps=1) as again:
        return {
            "all_steps": asked(again.all_steps),
            "latest_step": asked(again.latest_step),
            "holds_steps": asked(again.holds_steps),
            "should_save": asked(lambda: again.should_save(number)),
            "restore": asked(lambda: restored(again)),
            "the first save": asked(lambda: save(again, number + 1)),
            "another save": asked(lambda: save(again, number + 2)),
        }


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_listing_costs_the_same_for_any_number_of_steps(scheme, address_of, use):
    """Each step took 30 requests at every listing, and 9 more when the directory was opened for saving."""
    with Proxy(address_of(scheme)) as proxy:
        use(scheme, proxy.address)
        few, many = requests_with(3, scheme, proxy), requests_with(12, scheme, proxy)
    assert many == few
    assert few["all_steps"] == 1
    assert few["latest_step"] == 2
