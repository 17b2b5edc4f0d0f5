"""Judging models with EleutherAI's lm-eval harness, on the mesh. Needs the package lm-eval: extra `lm-eval`.

    settings.py    what to judge with: tasks, few-shot examples, chat template
    texts.py       text <-> tokens, by the rules of lm-eval's own `hf` backend
    shapes.py      the few shapes of the batches, and which requests share a batch
    answers.py     finished requests on disk, so that a job that was killed goes on
    steps.py       the steps on the devices: scores of given tokens, continuations of prompts
    requests.py    runs requests on the mesh: scores and continuations of token sequences
    model.py       the model as lm-eval sees it
    judge.py       runs the harness on a train state, and writes the results

Only model.py and judge.py import lm-eval, where they use it.
"""
