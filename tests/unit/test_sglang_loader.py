"""Writing in place: the loader on torch models, whose parameters are fused, sharded and padded, behind the stand-in."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from served_model import Served, save, tensors
from sglang_run import FROM_DISK, IN_PLACE, Run, State, served, starting

from deltasync.errors import EngineError, InvalidInputError, MismatchError
from deltasync.format.layout import Layout
from deltasync.sglang import loader
from deltasync.sglang.in_place import TENSOR_NAME, Answer, Request


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    with starting(tmp_path) as begin:
        yield begin


def test_a_type_that_differs_is_cast_as_sglang_casts_it(start: Callable[..., Run]) -> None:
    run = start([served(names=("cast",))], tensors(0, "cast"))
    run.advance()
    run.step(1)
    assert run.advance() == IN_PLACE
    found = run.server.workers[0].cast.weight  # type: ignore[attr-defined]
    wanted = run.state["cast.weight"].float()
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())


def test_bits_that_are_not_those_written_are_damage(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = start()
    run.advance()
    located = loader._located

    def twice(*args: Any) -> Iterator[Any]:
        for bits, places, values in located(*args):
            yield bits, places, values
            yield bits, places[:1], values[:1] ^ 1

    monkeypatch.setattr(loader, "_located", twice)
    run.step(1)
    assert run.advance() == [*IN_PLACE[:-2], *FROM_DISK[1:]]
    assert "are not those that were written" in caplog.text
    run.require_bits()
    assert run.target.version == 1


def failing(*args: Any) -> Iterator[Any]:
    raise RuntimeError("CUDA out of memory")


def test_a_worker_that_fails_answers_and_does_not_end_the_server(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = start()
    run.advance()
    run.step(1)
    with monkeypatch.context() as patch:
        patch.setattr(loader, "_located", failing)
        assert run.advance() == [*IN_PLACE[:-2], *FROM_DISK[1:]]
    assert "CUDA out of memory" in caplog.text
    run.require_bits()
    run.step(2)
    assert run.advance() == IN_PLACE


def test_a_server_whose_weights_are_written_in_part_generates_nothing(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = start([served(rank=rank, size=2) for rank in range(2)])
    run.advance()
    located = loader._located

    def only_first(live: Any, path: Path) -> Iterator[Any]:
        return failing() if live is loader._live[run.server.workers[1]] else located(live, path)  # type: ignore[index]

    run.step(1)
    run.server.refusal = "the disk cannot be read"
    with monkeypatch.context() as patch:
        patch.setattr(loader, "_located", only_first)
        for _ in range(2):
            with pytest.raises(EngineError, match="the disk cannot be read"):
                run.advance()
            assert run.server.paused is not None, "it would answer with weights of no version, and call them 0"
            assert run.target.version is None
    assert "stays paused" in caplog.text
    run.server.refusal = None
    assert run.advance() == FROM_DISK
    run.require_bits()


@pytest.mark.parametrize("change", [{"version": 7}, {"version": None}, {"layout": Layout(())}])
def test_changes_that_do_not_fit_are_refused_before_anything_is_written(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    run = start()
    run.advance()
    model = run.server.workers[0]
    assert isinstance(model, Served)
    before, live = model.bits(), loader._live[model]
    for name, value in change.items():
        setattr(live, name, value)
    run.step(1)
    monkeypatch.setattr(run.target, "_load", lambda staged: None)
    with pytest.raises(EngineError, match="has the weights '0'"):
        run.advance()
    after = model.bits()
    assert all(np.array_equal(after[name], before[name]) for name in before)


class Aliased(Served):
    """Its loader writes past the parameter."""

    def load_weights(self, weights: Any) -> set[str]:
        def noted() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                if name == "norm.weight" and hasattr(self, "_alias"):
                    self._alias.copy_(tensor)
                yield name, tensor

        return super().load_weights(noted())


def aliased() -> Served:
    model = served()
    model.__class__ = Aliased
    model._alias = model.norm.weight.data
    return model


def derived() -> Served:
    model = served()
    model.norm.squared = torch.ones(8)
    return model


def listed() -> Served:
    model = served()
    model.norm.derived = [torch.ones(8)]
    return model


def kept() -> Served:
    class Method:
        def __init__(self) -> None:
            self.squared = torch.ones(8)

    Method.__module__ = "sglang.srt.layers.quantization.base"
    model = served()
    model.norm.method = Method()
    return model


class Late(Served):
    def post_load_weights(self) -> None: ...


def late() -> Served:
    model = served()
    model.__class__ = Late
    return model


@pytest.mark.parametrize(
    ("model", "state", "message"),
    [
        (lambda: served(names=("quantized",)), lambda: tensors(0, "quantized"), "quantized.weight"),
        (lambda: served(names=("cast",)), tensors, None),
        (served, lambda: {**tensors(), "lm_head.weight": tensors()["embed.weight"]}, "'lm_head.weight'"),
        (derived, tensors, "'norm.squared' beside its parameters"),
        (listed, tensors, "'norm.derived.0' beside its parameters"),
        (kept, tensors, "'norm.method.squared' beside its parameters"),
        (late, tensors, "post_load_weights"),
        (aliased, tensors, "changed while the loader of the model was traced"),
    ],
)
def test_what_cannot_be_mapped_is_refused_by_name_at_the_start(
    start: Callable[..., Run], model: Callable[[], Served], state: Callable[[], State], message: str | None
) -> None:
    run = start([model()], state())
    if message is None:
        # A parameter that the feed lacks stays as it is.
        assert run.advance() == FROM_DISK
        return
    with pytest.raises(MismatchError, match="cannot be written in place") as error:
        run.follower.advance()
    assert message in error.value.message
    assert run.target.version is None
    assert (run.server.weight_version, run.server.paused, run.server.is_session_open) == ("0", None, False)
    fresh = run.server.workers[0].norm.weight  # type: ignore[attr-defined]
    assert torch.equal(fresh.view(torch.int16), run.state["norm.weight"].view(torch.int16)), (
        "the server has the version"
    )


class Anew(Served):
    """Its loader registers a parameter anew, as some loaders do with a bias."""

    def load_weights(self, weights: Any) -> set[str]:
        self.norm.weight = torch.nn.Parameter(torch.empty_like(self.norm.weight))
        self.norm.is_loaded = True
        return super().load_weights(weights)


def mapped(model: Served, folder: Path) -> Answer:
    """What a worker answers that is asked to map its weights, which are those of the folder."""
    request = Request("map", str(folder), 0, "1").to_json()
    loader.load(model, [(TENSOR_NAME, torch.tensor(list(request), dtype=torch.uint8))])
    [path] = folder.glob(".deltasync.answer.*")
    return Answer.read(path)


def test_a_worker_compares_what_it_maps(tmp_path: Path) -> None:
    state = tensors()
    save(state, tmp_path / "model.safetensors")
    model = served()
    model.load_weights(state.items())
    assert mapped(model, tmp_path).refused is None
    assert loader._live[model].version == 0
    model.pack()
    assert "holds 'packed.a' in another form" in str(mapped(model, tmp_path).refused)
    assert model not in loader._live


def test_tracing_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    state = tensors()
    save(state, tmp_path / "model.safetensors")
    model = served().load(state.items())
    model.__class__ = Anew
    parameters, bits = dict(model.named_parameters()), model.bits()
    answer = mapped(model, tmp_path)
    assert answer.damaged is None
    assert "'norm.weight'" in str(answer.refused)
    assert not hasattr(model.norm, "is_loaded")
    assert all(found is parameters[name] for name, found in model.named_parameters())
    assert all(np.array_equal(found, bits[name]) for name, found in model.bits().items())


def test_weights_in_another_form_than_the_checkpoint_are_refused(start: Callable[..., Run]) -> None:
    run = start()
    run.server.restores = False
    with pytest.raises(MismatchError, match=r"holds 'packed\.a' in another form"):
        run.follower.advance()
    run.require_bits()


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ([("model.norm.weight", torch.ones(2))], "takes one tensor"),
        ([], "takes one tensor"),
        ([(TENSOR_NAME, torch.zeros(3, dtype=torch.uint8))], "not JSON"),
        ([(TENSOR_NAME, torch.tensor(list(b"[1]"), dtype=torch.uint8))], "not an object"),
        ([(TENSOR_NAME, torch.tensor(list(b'{"a": 1}'), dtype=torch.uint8))], "not a request"),
        (
            [(TENSOR_NAME, torch.tensor(list(Request("erase", "", 0, "").to_json()), dtype=torch.uint8))],  # type: ignore[arg-type]
            "not a request",
        ),
    ],
)
def test_other_tensors_are_refused(named: list[tuple[str, torch.Tensor]], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        loader.load(served(), named)


def test_weights_that_were_changed_while_a_worker_was_traced_are_loaded_again(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other worker does not answer, so that nothing says that they were changed."""
    write = Answer.write
    run = start([aliased(), served()])
    with monkeypatch.context() as patch:
        patch.setattr(Answer, "write", lambda self, path: None if path.suffix == ".1" else write(self, path))
        with pytest.raises(EngineError, match="did not answer"):
            run.advance()
    run.require_bits()
