"""What a child can do that was forked while another thread held every lock of ours."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, WarmInterpreter

SCRIPT = """
import logging, os, signal, threading, warnings
from contextlib import ExitStack
import torch
from ck_patch import forks, log, patcher
from ck_patch.breaker import Breaker
from ck_patch.candidates import Candidates, Candidate
from ck_patch.device import profile
from ck_patch.ops import first_use
from ck_patch.ops.timer import EventTimer
from ck_patch.route import GemmCall
from ck_patch.table import Entry, Table
from ck_patch.trial import Trial
from ck_patch.tuner import Tuner

warnings.simplefilter("ignore")
said = []
class Handler(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("ck_patch").addHandler(Handler())
log.configure("info")
log.once("before", "before the fork")

gpu, call = profile(0, (8, 6)), GemmCall(64, 64, 64, "float16")
table, breaker, timer = Table(None, {}), Breaker(), EventTimer()
tuner = Tuner("auto", lambda gpu: table)
found = Candidates((Candidate(), Candidate(stock_config=0)), "")
trial, uses = tuner.choose(0, gpu, call, found, bool), first_use.FirstUse()
uses._of(0)
known = [patcher._PATCHER, table, timer, tuner, trial, uses, first_use._triton]
assert {type(one) for one in known} == set(forks.ForkSafe.__subclasses__())

def locks():
    for one in known:
        for value in vars(one).values():
            for lock in value.values() if isinstance(value, dict) else (value,):
                if hasattr(lock, "acquire"):
                    yield lock

held, over = threading.Event(), threading.Event()
def hold():
    with ExitStack() as stack:
        for lock in locks():
            stack.enter_context(lock)
        held.set()
        over.wait()
holder = threading.Thread(target=hold)
holder.start()
held.wait()

def work():
    log.once("before", "before the fork")
    log.once("after", "in the child")
    assert said == ["before the fork", "in the child"]
    assert breaker.open("op", 0, "why") and breaker.snapshot()
    patcher.enable()
    patcher.status()
    patcher.disable()
    table.put("key", Entry("stock", 1, {}, "run"))
    assert table.get("key")
    assert tuner.choose(0, gpu, call, found, bool) is trial
    trial.add(trial.next(), 1.0)
    timer.collect()
    ran = []
    assert uses.prove(-1, 0, lambda: ran.append(1), lambda: None) == (True, None)
    assert ran and not uses._of(0).locked()

child = os.fork()
if child == 0:
    signal.alarm(60)
    try:
        work()
        os._exit(0)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
result = os.waitpid(child, 0)[1]
over.set()
holder.join()
assert len(list(locks())) >= len(known)
"""


def test_a_child_forked_while_a_thread_held_every_lock_waits_for_none(
    warm_interpreter: WarmInterpreter, tmp_path: Path
) -> None:
    env = {"CK_PATCH_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    assert warm_interpreter.run(SCRIPT, env=env) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_the_thread_that_forks_may_hold_a_lock_itself(warm_interpreter: WarmInterpreter) -> None:
    script = """
import os
from ck_patch.forks import ForkSafe
one = ForkSafe()
with one._lock:
    child = os.fork()
    if child == 0:
        with one._lock:
            pass
if child == 0:
    os._exit(0)
assert not one._lock.locked()
result = os.waitpid(child, 0)[1]
"""
    assert warm_interpreter.run(script) == 0


def test_no_lock_is_made_but_by_those_who_are_safe() -> None:
    for path in sorted(REPOSITORY.joinpath("ck_patch").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        safe = {
            id(node)
            for owner in ast.walk(tree)
            if isinstance(owner, ast.ClassDef)
            and "ForkSafe" in (owner.name, *(ast.unparse(base) for base in owner.bases))
            for node in ast.walk(owner)
        }
        made = [
            ast.unparse(node)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and ast.unparse(node.func).startswith(("threading.", "_thread."))
            and ast.unparse(node.func).endswith(("Lock", "Condition", "Semaphore", "Event"))
            and id(node) not in safe
        ]
        assert made == [], path
