"""A method's round, taken out of its generate, to be run step by step."""
import importlib

import verify


def a_round(name, target, prompt=(1, 2, 3, 4), device="cpu", temperature=0.0, drafter=None, **settings):
    """(session, drafter, draft, verify) of a method after prefill, as its generate composes them."""
    method = importlib.import_module(name)
    if drafter is None:
        drafter = method.Drafter(target.config, method.Args(**settings)).to(device, target.wte.weight.dtype).eval()
    found = []

    def run(session, draft, verify_):
        found.extend((session, drafter, draft, verify_))
        return session.record

    original, verify.Session.run = verify.Session.run, run
    try:
        method.generate(target, drafter, list(prompt), target.config.max_seq_len, temperature)
    finally:
        verify.Session.run = original
    return found
