"""Evaluates a model on the mesh with EleutherAI's lm-eval (pip install 'spmd-trainer[lm-eval]'), and chats with the model.

    settings.py        tasks, few-shot examples, chat template
    texts.py           text to tokens and back, in the same way as lm-eval's own `hf` backend
    steps.py           the compiled steps, their few batch shapes, and which requests share a batch
    requests.py        runs requests on the mesh, and keeps finished answers on disk so that a killed job resumes
    model.py           implements lm-eval's model interface
    harness_runner.py  runs the harness on a train state, and writes the results
    mode.py            --mode=lm_eval
    chat.py            --mode=chat, without the harness
    lm_eval.py         the callback: evaluations during training

Only model.py and harness_runner.py import lm-eval, lazily.
"""
