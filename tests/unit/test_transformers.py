"""The callback inside real trainers on tiny models: every version must be what the trainer had, bit for bit."""

import copy
import json
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig, PeftConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from support import processes
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from deltasync.errors import DeltasyncError, InvalidInputError, StoreError
from deltasync.feed.log import Log
from deltasync.format import keys
from deltasync.store.memory import MemoryStore
from deltasync.store.protocol import Data, Store
from deltasync.torch.tensors import named_tensors
from deltasync.trainer.publisher import PublisherOptions
from deltasync.transformers import AdapterTensors, DeltasyncCallback, merged_tensors, model_files, saved_files
from deltasync.upkeep.restore import restore

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
State = dict[str, torch.Tensor]


def llama(*, tied: bool = False, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied)).to(dtype)


def with_adapter(config: PeftConfig, **options: Any) -> PeftModel:
    """A model whose adapter does something: some kinds begin as nothing."""
    model = get_peft_model(llama(**options), config)
    torch.manual_seed(1)
    for _, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model


class Recorder(TrainerCallback):
    """Copies what the trainer has whenever the callback before it may publish."""

    def __init__(self, tensors: Callable[[Any], Any]) -> None:
        self.tensors = tensors
        self.states: dict[int, State] = {}

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.on_step_end(args, state, control, **kwargs)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.states[state.global_step] = {n: t.detach().clone() for n, t in dict(self.tensors(kwargs["model"])).items()}


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    settings = {
        "output_dir": str(folder / "trainer"),
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(**{**settings, **options})


def train(model: Any, folder: Path, *callbacks: TrainerCallback, tokenizer: Any = None, **options: Any) -> Trainer:
    ids = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(2))
    data = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Trainer(
        model, arguments(folder, **options), train_dataset=data, callbacks=[*callbacks], processing_class=tokenizer
    )
    trainer.train()
    return trainer


def restored(store: Store, folder: Path, version: int) -> State:
    out = folder / f"version-{version}"
    restore(store, out, version=version)
    return dict(load_file(out / "model.safetensors"))


def assert_same_bits(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def steps(store: Store) -> list[int | None]:
    log = Log(store)
    return [log.read(version).step for version in log.versions()]


def test_every_step_is_a_version_that_loads_as_the_trainer_had_it(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w1")
    store, recorder = MemoryStore(), Recorder(named_tensors)
    model = llama(tied=True)
    with DeltasyncCallback(store, options=PublisherOptions(wait=True)) as callback:
        train(model, tmp_path, callback, recorder, tokenizer=tokenizer, gradient_accumulation_steps=2)
    assert steps(store) == [0, 1, 2, 3]
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    for version, expected in enumerate(recorder.states.values()):
        found = restored(store, tmp_path, version)
        assert_same_bits(found, expected)
        assert found.keys() == saved.keys()
    assert_same_bits(found, saved)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "version-3")
    assert type(loaded) is LlamaForCausalLM
    assert loaded.generation_config.to_dict() == model.generation_config.to_dict()
    assert AutoTokenizer.from_pretrained(tmp_path / "version-3").convert_tokens_to_ids("w7") == 7


@pytest.mark.parametrize(
    ("every_steps", "max_steps", "expected"),
    [(1, 2, [0, 1, 2]), (2, 5, [0, 2, 4, 5]), (2, 4, [0, 2, 4]), (9, 3, [0, 3])],
)
def test_every_few_steps_and_the_last(tmp_path: Path, every_steps: int, max_steps: int, expected: list[int]) -> None:
    store, model = MemoryStore(), llama()
    train(
        model,
        tmp_path,
        DeltasyncCallback(store, every_steps=every_steps, options=PublisherOptions(wait=True)),
        max_steps=max_steps,
    )
    assert steps(store) == expected
    assert_same_bits(restored(store, tmp_path, len(expected) - 1), named_tensors(model))


def test_options_reach_the_publisher_and_the_configuration(tmp_path: Path) -> None:
    store, model = MemoryStore(), llama()
    train(model, tmp_path, DeltasyncCallback(store, dtype=torch.bfloat16, files={"notes/a.txt": b"hello"}))
    found = restored(store, tmp_path, Log(store).require_head().version)
    assert_same_bits(found, {name: tensor.bfloat16() for name, tensor in named_tensors(model).items()})
    folder = next(tmp_path.glob("version-*"))
    config = json.loads((folder / "config.json").read_text())
    assert (config["dtype"], config["architectures"]) == ("bfloat16", ["LlamaForCausalLM"])
    assert (folder / "notes" / "a.txt").read_bytes() == b"hello"


def test_the_configuration_is_what_the_model_would_save(tmp_path: Path) -> None:
    model = llama(tied=True, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    saved = {path.name: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert {name: json.loads(data) for name, data in model_files(model).items()} == saved


def test_training_goes_on_in_the_feed_after_a_restart(tmp_path: Path) -> None:
    store, model = MemoryStore(), llama()
    callback = DeltasyncCallback(store, options=PublisherOptions(wait=True))
    train(model, tmp_path, callback, max_steps=2)
    train(model, tmp_path, callback, max_steps=1)
    assert steps(store) == [0, 1, 2, 0, 1]
    assert_same_bits(restored(store, tmp_path, 4), named_tensors(model))


def test_only_the_main_process_publishes() -> None:
    store, control = MemoryStore(), TrainerControl()
    state = TrainerState(is_world_process_zero=False, global_step=1)
    callback = DeltasyncCallback(store)
    for event in (callback.on_train_begin, callback.on_step_end, callback.on_train_end):
        event(None, state, control, model=llama(), processing_class=None)
    assert list(store.list()) == []
    assert callback.last is None


def test_fused_experts_are_published_as_the_checkpoint_names_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    store, model = MemoryStore(), Qwen3MoeForCausalLM(config)
    train(model, tmp_path, DeltasyncCallback(store, options=PublisherOptions(wait=True)), max_steps=1)
    model.save_pretrained(tmp_path / "saved")
    assert_same_bits(restored(store, tmp_path, 1), load_file(tmp_path / "saved" / "model.safetensors"))


class Crash(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of memory")


def test_training_that_fails_leaves_a_closed_feed(tmp_path: Path) -> None:
    store, model = MemoryStore(), llama()
    with pytest.raises(RuntimeError, match="out of memory"), DeltasyncCallback(store) as callback:
        train(model, tmp_path, callback, Crash())
    assert callback.last is not None
    assert_same_bits(restored(store, tmp_path, callback.last.wait(0).version), named_tensors(model))
    callback.close()


class Reshape(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["model"].resize_token_embeddings(65)


def test_weights_that_cannot_be_published_stop_training(tmp_path: Path) -> None:
    store = MemoryStore()
    with pytest.raises(DeltasyncError, match=r"lm_head\.weight"):
        train(llama(), tmp_path, Reshape(), DeltasyncCallback(store))
    assert steps(store) == [0]


class FullStore(MemoryStore):
    """Takes the first version only."""

    def create(self, key: str, data: Data) -> bool:
        if keys.parse_version_key(key) not in (None, 0):
            raise StoreError("the disk is full", transient=False)
        return super().create(key, data)


def test_a_last_version_that_is_not_committed_is_an_error(tmp_path: Path) -> None:
    store, model = FullStore(), llama()
    with pytest.raises(StoreError, match="the disk is full"):
        train(model, tmp_path, DeltasyncCallback(store), max_steps=3)
    assert steps(store) == [0]


ADAPTERS: dict[str, tuple[PeftConfig, dict[str, Any]]] = {
    "lora": (LoraConfig(target_modules=["q_proj", "v_proj"], r=4), {}),
    "lora in bfloat16": (LoraConfig(target_modules="all-linear", r=4, use_rslora=True), {"dtype": torch.bfloat16}),
    "dora": (LoraConfig(target_modules=["q_proj", "down_proj"], r=4, use_dora=True), {}),
    "lora on embeddings": (LoraConfig(target_modules=["embed_tokens", "q_proj"], r=4), {}),
    "lora beside tied weights": (LoraConfig(target_modules=["q_proj"], r=4), {"tied": True}),
    "modules to save": (LoraConfig(target_modules=["q_proj"], r=4, modules_to_save=["lm_head", "norm"]), {}),
    "new tokens": (LoraConfig(target_modules=["q_proj"], r=4, trainable_token_indices=[1, 5]), {}),
    "ia3": (IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]), {}),
    "loha": (LoHaConfig(target_modules=["q_proj", "up_proj"], r=4), {}),
}


@pytest.fixture(params=ADAPTERS.items(), ids=ADAPTERS.keys())
def adapted(request: pytest.FixtureRequest) -> PeftModel:
    config, options = request.param[1]
    return with_adapter(copy.deepcopy(config), **options)


def test_merged_is_what_merging_a_copy_gives_and_leaves_the_model_alone(adapted: PeftModel) -> None:
    expected = named_tensors(copy.deepcopy(adapted).merge_and_unload())
    adapted(torch.arange(6)[None]).logits.sum().backward()
    before = {name: tensor.clone() for name, tensor in adapted.state_dict().items()}
    grads = {name: p.grad.clone() for name, p in adapted.named_parameters() if p.grad is not None}
    found = {name: tensor.clone() for name, tensor in merged_tensors(adapted)}
    assert_same_bits(found, expected)
    base = named_tensors(llama(tied=adapted.config.tie_word_embeddings, dtype=adapted.dtype))
    assert found.keys() == base.keys()
    assert any(not torch.equal(found[name], base[name]) for name in base)
    assert_same_bits(adapted.state_dict(), before)
    assert_same_bits({n: p.grad for n, p in adapted.named_parameters() if p.grad is not None}, grads)
    assert torch.is_grad_enabled()


def test_merged_weights_come_one_layer_at_a_time() -> None:
    model = with_adapter(LoraConfig(target_modules="all-linear", r=4))
    own = {parameter.data_ptr() for parameter in model.parameters()}
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0
    for _, tensor in merged_tensors(model):
        if tensor.data_ptr() not in own:
            alive.add(tensor)
        most = max(most, len(alive))
    assert 1 <= most <= 2


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_adapter_alone_has_the_names_and_bits_that_peft_saves(adapted: PeftModel, tmp_path: Path) -> None:
    adapted.save_pretrained(tmp_path)
    adapter = AdapterTensors(adapted)
    assert_same_bits({name: t.contiguous() for name, t in adapter}, load_file(tmp_path / "adapter_model.safetensors"))
    assert adapter.files() == {"adapter_config.json": (tmp_path / "adapter_config.json").read_bytes()}


@pytest.mark.parametrize(("what", "expected"), [("adapter", AdapterTensors), ("merged", merged_tensors)])
def test_adapters_are_published_while_they_are_trained(
    tmp_path: Path, what: Any, expected: Callable[[PeftModel], Iterator[tuple[str, torch.Tensor]]]
) -> None:
    store, recorder = MemoryStore(), Recorder(expected)
    model = with_adapter(LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
    train(model, tmp_path, DeltasyncCallback(store, what=what, options=PublisherOptions(wait=True)), recorder)
    assert steps(store) == [0, 1, 2, 3]
    for version in range(4):
        assert_same_bits(restored(store, tmp_path, version), recorder.states[version])
    folder = tmp_path / "version-3"
    if what == "merged":
        loaded = AutoModelForCausalLM.from_pretrained(folder)
    else:
        (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
        loaded = PeftModel.from_pretrained(llama(), folder).merge_and_unload()
    assert_same_bits(named_tensors(loaded), dict(merged_tensors(model)))


@pytest.mark.parametrize(
    ("model", "what", "message"),
    [
        (lambda: with_adapter(LoraConfig(target_modules=["q_proj"])), "model", "has PEFT adapters"),
        (llama, "merged", "is not a PEFT model"),
        (llama, "adapter", "is not a PEFT model"),
        (lambda: with_adapter(LoraConfig(target_modules=["lm_head"]), tied=True), "merged", "are tied"),
        (lambda: with_adapter(LoraConfig(target_modules=["embed_tokens"]), tied=True), "merged", "are tied"),
        (
            lambda: with_adapter(LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"]), tied=True),
            "merged",
            "are tied",
        ),
        (
            lambda: with_adapter(PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")),
            "merged",
            "cannot be merged",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_cannot_be_published_is_refused(tmp_path: Path, model: Callable[[], Any], what: Any, message: str) -> None:
    store = MemoryStore()
    with pytest.raises(InvalidInputError, match=message) as caught:
        train(model(), tmp_path, DeltasyncCallback(store, what=what))
    assert caught.value.hint is not None
    assert steps(store) == []


def test_shards_that_are_not_tensors_of_the_checkpoint_are_refused_in_every_process() -> None:
    group = torch.distributed
    group.init_process_group("gloo", store=group.HashStore(), rank=0, world_size=1)
    try:
        model = with_adapter(LoraConfig(target_modules=["q_proj"]))
        weight = model.base_model.model.lm_head.weight.data
        shard = distribute_tensor(weight, DeviceMesh("cpu", [0]), [Replicate()])
        model.base_model.model.lm_head.weight = torch.nn.Parameter(shard)
        for is_main in (True, False):
            state = TrainerState(is_world_process_zero=is_main)
            with pytest.raises(InvalidInputError, match="have to be computed from shards"):
                DeltasyncCallback(MemoryStore(), what="merged").on_train_begin(
                    None, state, TrainerControl(), model=model
                )
    finally:
        group.destroy_process_group()


def test_shards_of_deepspeed_are_refused() -> None:
    model = llama()
    model.lm_head.weight.ds_id = 3
    with pytest.raises(InvalidInputError, match=r"DeepSpeed \(lm_head.weight\)"):
        DeltasyncCallback(MemoryStore()).on_train_begin(None, TrainerState(), TrainerControl(), model=model)


@pytest.mark.parametrize(
    ("options", "error"),
    [({"every_steps": 0}, InvalidInputError), ({"every_step": 1}, TypeError), ({"retries_s": 3}, TypeError)],
)
def test_wrong_options_are_found_at_once(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        DeltasyncCallback(MemoryStore(), **options)


def test_a_machine_without_peft_imports_the_callback() -> None:
    code = "import sys; sys.modules['peft'] = None\nimport deltasync.transformers"
    done = processes.run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr


def test_saved_code_is_not_published() -> None:
    """A tokenizer of the Hub with code of its own saves that code as well."""

    class Saved:
        def save_pretrained(self, folder: str) -> None:
            for name in ("tokenizer.json", "tokenization_own.py", "training_args.bin"):
                Path(folder, name).write_bytes(b"x")

    assert saved_files(Saved()) == {"tokenizer.json": b"x"}
