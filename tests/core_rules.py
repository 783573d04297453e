"""Events that may reach any core at any moment, as rules of a state machine; its end compares with the solo run."""

import hypothesis.strategies as st
from driver import Driver
from fakes.runner import FakeRunner, solo
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from engine.api import EngineRequest, FinishReason


class CoreRules(RuleBasedStateMachine):
    """A subclass makes the `driver`, of a FakeRunner of `vocab` tokens, and adds each request to `requests`, too."""

    driver: Driver
    requests: dict[str, EngineRequest]
    vocab: int

    @rule()
    def launch(self) -> None:
        self.driver.launch()

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def complete(self) -> None:
        self.driver.complete()

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def fail(self) -> None:
        runner = self.driver.runner
        assert isinstance(runner, FakeRunner)
        runner.fail_steps = frozenset({self.driver.in_flight[0].step_id})
        self.driver.complete()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.driver.abort(data.draw(st.sampled_from(sorted(self.requests))))

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.run()
        for name, request in self.requests.items():
            if request.pooling is not None:
                assert self.driver.outputs[name] == []
            elif self.driver.finals[name].finish_reason in {FinishReason.STOP, FinishReason.LENGTH}:
                expected = solo(request, self.vocab)
                assert self.driver.outputs[name] == expected, name
