"""Collections of old objects wait until no request waits. Child processes spare pytest's collector."""

import subprocess
import sys
import textwrap

import pytest


def run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_exit_reports_no_leaks_of_triton() -> None:
    """The frozen objects include the functions of extension modules, which look for leaks when they are unloaded."""
    pytest.importorskip("triton")
    script = "import triton\nfrom engine.machine import child\nchild.settle()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


COMMON = """
    import gc
    from engine.machine import child

    class Node:
        pass

    def leak(count):  # cycles that live through a collection of young objects before they are let go
        nodes = [Node() for _ in range(count)]
        for node in nodes:
            node.self = node
        gc.collect(0)
        return nodes

    seen = []
    gc.callbacks.append(lambda phase, info: seen.append(info["generation"]) if phase == "start" else None)
"""


def test_old_objects_are_collected_at_rest_and_at_a_bound_while_somebody_waits() -> None:
    out = run(
        COMMON
        + """
    def kept():
        return sum(isinstance(each, Node) for each in gc.get_objects())

    child.settle()
    seen.clear()
    for _ in range(child.AT_REST + 1):
        leak(3_000)
    before = kept()
    child.collect_due(at_rest=False)
    assert set(seen) == {0} and before > 50_000, (set(seen), before)
    child.collect_due(at_rest=True)
    assert 2 in seen and kept() == 0
    seen.clear()
    child.collect_due(at_rest=True)
    assert not seen, "there was nothing new"
    child.AT_MOST, most = 30, 0
    for _ in range(100):
        leak(1_000)
        child.collect_due(at_rest=False)
        most = max(most, kept())
    assert 10_000 < most <= 31_000, most
    print("ok")
    """
    )
    assert out == "ok"


@pytest.mark.slow
@pytest.mark.parametrize("settled", [False, True])
def test_an_engine_that_serves_chats_looks_at_young_objects_only(settled: bool) -> None:
    """Four thousand requests; without `settle` the interpreter looks at older objects in their midst."""
    out = run(
        COMMON
        + f"""
    import asyncio, sys
    sys.path.insert(0, "tests")
    from driver import make_request
    from test_engine import make_engine

    async def main():
        engine = make_engine(max_num_seqs=64, num_units=4096)
        await engine.start()

        async def ask(number):
            request = make_request(f"r{{number}}", list(range(20)), 8)
            (stream,) = await engine.submit([request])
            return [output async for output in stream]

        if {settled}:
            child.settle()
        seen.clear()
        kept = []
        for first in range(0, 4_000, 100):  # a chat is always open
            kept += await asyncio.gather(*(ask(first + i) for i in range(100)))
        print(sorted(set(seen)))
        await engine.stop()

    asyncio.run(main())
    """
    )
    assert ("1" in out) is not settled, out
