"""A model of transformers brings what is needed to load it: from `publish` to a folder that `from_pretrained` loads."""

import json
import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from support import LONG_S
from support.feeds import NEVER
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
)

from deltasync import FolderTarget, Follower, InvalidInputError, PublisherOptions, restore
from deltasync.feed.fetch import fetch_files
from deltasync.feed.log import Log
from deltasync.store.local import LocalStore
from deltasync.store.memory import MemoryStore
from deltasync.torch import Publisher
from deltasync.transformers import model_files


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    made = LlamaForCausalLM(config)
    made.generation_config.max_new_tokens = 7
    return made


def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")))


def publish(store: Any, weights: Any, *, dtype: torch.dtype | None = None, **options: Any) -> dict[str, bytes]:
    """The files beside the weights of the version that this makes."""
    with Publisher(store, dtype=dtype, options=PublisherOptions(anchors=NEVER, **options)) as publisher:
        manifest = publisher.publish(weights).wait(LONG_S)
    return fetch_files(store, manifest)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_followed_folder_is_loaded_by_transformers(tmp_path: Path, dtype: torch.dtype | None) -> None:
    trained = model()
    files = publish(LocalStore(tmp_path / "feed"), trained, dtype=dtype, processing_class=tokenizer())
    assert files == model_files(trained, tokenizer(), dtype=dtype), "one piece makes both"
    with (
        closing(FolderTarget(tmp_path / "served")) as target,
        Follower(tmp_path / "feed", target, beat_s=None) as follower,
    ):
        follower.advance()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "served")
    assert type(loaded) is LlamaForCausalLM
    assert loaded.dtype == (torch.float32 if dtype is None else dtype)
    assert loaded.generation_config.max_new_tokens == 7
    assert AutoTokenizer.from_pretrained(tmp_path / "served")("b")["input_ids"] == [1]
    for name, tensor in trained.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.to(loaded.dtype)), name


def test_what_is_given_takes_precedence() -> None:
    files = publish(MemoryStore(), model(), files={"config.json": b"{}", "notes.txt": b"mine"})
    assert files.keys() == {"config.json", "generation_config.json", "notes.txt"}
    assert files["config.json"] == b"{}"


def test_wrapped_models_are_looked_through() -> None:
    compiled = torch.compile(model())
    files = publish(MemoryStore(), compiled)
    assert json.loads(files["config.json"])["architectures"] == ["LlamaForCausalLM"]


def test_a_model_that_does_not_generate_has_no_generation_config() -> None:
    config = T5Config(vocab_size=20, d_model=8, d_ff=8, d_kv=4, num_layers=1, num_heads=2)
    assert publish(MemoryStore(), T5EncoderModel(config)).keys() == {"config.json"}


class HasConfig(torch.nn.Module):
    """A module of a user's own, with an attribute that only has the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"layers": 2}
        self.weight = torch.nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize("weights", [HasConfig(), {"w": torch.zeros(2)}, [("w", torch.zeros(2))]], ids=type)
def test_other_weights_bring_nothing(weights: Any) -> None:
    assert publish(MemoryStore(), weights) == {}


def test_a_resumed_feed_keeps_its_files_unless_others_are_given() -> None:
    """The tokenizer of the first run is not dropped because the second one did not mention it."""
    store = MemoryStore()
    first = publish(store, model(), processing_class=tokenizer())
    assert publish(store, model()) == first
    assert publish(store, model(), files={"notes.txt": b""}).keys() == {
        "config.json", "generation_config.json", "notes.txt"
    }  # fmt: skip


def test_a_resumed_feed_without_files_gets_a_config() -> None:
    store = MemoryStore()
    assert publish(store, model().state_dict()) == {}
    assert publish(store, model()).keys() == {"config.json", "generation_config.json"}
    assert [m.files is None for m in Log(store).read_many(range(2))] == [True, False]


def test_a_feed_without_a_config_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    store = LocalStore(tmp_path / "feed")
    publish(store, {"w": torch.zeros(2)})
    restore(store, tmp_path / "weights", files=False)
    assert caplog.text == "", "it was asked for"
    restore(store, tmp_path / "out")
    assert caplog.text.count("has no config.json") == 1
    publish(store, {"w": torch.ones(2)})
    with closing(FolderTarget(tmp_path / "served")) as target, Follower(store, target, beat_s=None) as follower:
        follower.advance(to=0)
        follower.advance(to=1)
    assert caplog.text.count("has no config.json") == 2, "a follower says so once"


def test_a_processing_class_must_be_one() -> None:
    with pytest.raises(InvalidInputError, match=r"processing_class must be a tokenizer or a processor .* not 'gpt2'"):
        PublisherOptions(processing_class="gpt2")
