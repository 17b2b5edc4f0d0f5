"""Judging models with EleutherAI's lm-eval harness, on the mesh. Needs the package lm-eval: extra `lm-eval`.

    settings.py    what to judge with: tasks, few-shot examples, chat template
    texts.py       text <-> tokens, by the rules of lm-eval's own `hf` backend
    steps.py       the compiled steps, their few batch shapes, and which requests share a batch
    requests.py    runs requests on the mesh, and keeps finished answers on disk so that a killed job resumes
    model.py       the model as lm-eval sees it
    harness_runner.py  runs the harness on a train state, and writes the results
    mode.py        --mode=lm_eval

Only model.py and harness_runner.py import lm-eval, where they use it.
"""
