"""Make the first policy: a Qwen3 of 0.6 million weights that knows the form of the chat, trained in half a minute.

    python make_model.py FOLDER

It learns by imitation to call the tool `guess`, to spell the words, to follow marks now and then, and to stop when the
game is over. Without this there would be nothing to reward: random letters are never a word.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import on_cpu
import torch
from environment import GREEN, GUESSES, NO_WORD, OVER, SIGNS, WORDS, marks, marks_text
from game import PROMPT, WordleGame
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from trl.chat_template_utils import qwen3_instruct_2507_chat_template
from wordle.training import Learner, lr_share, small_model

STEPS, GAMES, LR, FOLLOWS_MARKS = 150, 32, 5e-3, 0.6
"""Of the imitation: steps, games in each, learning rate, and the share of guesses that fit all marks so far."""

PAD, BEGIN, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CALL, CALLED = '<tool_call>\n{"name": "guess", "arguments": {"word": "', '"}}\n</tool_call>'
RESPONSE, NEXT = f"{BEGIN}user\n<tool_response>\n", f"\n</tool_response>{END}\n{BEGIN}assistant\n"
LETTERS = "abcdefghijklmnopqrstuvwxyz"

Message = dict[str, Any]


def tokenizer_for(opening: str) -> PreTrainedTokenizerFast:
    """One token for each letter, for each letter with a mark, and for each text that is always the same.

    The chat has the form of the real Qwen3, which TRL knows, but most of it is a handful of tokens: a game fits into
    70 of them, and a small model need not learn JSON letter by letter.
    """
    words = ["<unk>", "\n", *LETTERS, *(letter + sign for letter in LETTERS for sign in SIGNS.values())]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[a-z][-~+]|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    phrases = [opening, CALL, CALLED, RESPONSE, NEXT, NO_WORD, OVER]
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    result = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token=PAD, eos_token=END, additional_special_tokens=[BEGIN]
    )
    result.chat_template = qwen3_instruct_2507_chat_template
    return result


def opening() -> str:
    """The text that every game starts with: the tools as TRL describes them, and the prompt."""
    return rendered(tokenizer_for(PAD), [{"role": "user", "content": PROMPT}], tokenize=False, to_be_continued=True)


def rendered(
    tokenizer: PreTrainedTokenizerFast, messages: list[Message], *, tokenize: bool, to_be_continued: bool
) -> Any:
    """A conversation as the policy reads it."""
    tools = [WordleGame("http://nowhere").guess]
    return tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=tokenize, add_generation_prompt=to_be_continued, return_dict=False
    )


def careless_game(chance: random.Random) -> list[Message]:
    """A game in which a guess fits all marks so far with the probability `FOLLOWS_MARKS`, and is any word otherwise."""
    messages: list[Message] = [{"role": "user", "content": PROMPT}]
    answer, fitting = chance.choice(WORDS), list(WORDS)
    for turn in range(GUESSES):
        word = chance.choice(fitting if chance.random() < FOLLOWS_MARKS else WORDS)
        given = marks(word, answer)
        is_over = turn == GUESSES - 1 or set(given) == {GREEN}
        call = {"type": "function", "function": {"name": "guess", "arguments": {"word": word}}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": "guess", "content": marks_text(word, given) + OVER * is_over})
        fitting = [each for each in fitting if marks(word, each) == given]
        if is_over:
            break
    return [*messages, {"role": "assistant", "content": ""}]


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """An untrained model."""
    model = small_model(
        vocabulary=128,
        tokens_max=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model


def imitate(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, chance: random.Random) -> float:
    """Learn from careless games and return the last loss. Only the tokens that the policy writes count."""
    learner = Learner(model, lr=LR)
    written = torch.tensor(tokenizer.convert_tokens_to_ids([*LETTERS, CALL, CALLED, END]))
    for step in range(STEPS):
        learner.lr = LR * lr_share(step, STEPS)
        games = [rendered(tokenizer, careless_game(chance), tokenize=True, to_be_continued=False) for _ in range(GAMES)]
        ids = tokenizer.pad({"input_ids": games}, return_tensors="pt")
        labels = torch.where(torch.isin(ids["input_ids"], written), ids["input_ids"], -100)
        loss = learner.step(model(**ids, labels=labels).loss)
    return loss


def make_model(folder: Path, *, seed: int = 0) -> float:
    """Write a policy and its tokenizer; return the last loss of the imitation."""
    torch.manual_seed(seed)
    if on_cpu.is_needed():
        on_cpu.adjust_torch()
    tokenizer = tokenizer_for(opening())
    model = new_model(tokenizer)
    loss = imitate(model, tokenizer, random.Random(seed))
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a small policy that can play Wordle badly.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if (options.folder / "config.json").exists():
        sys.exit(f"error: {options.folder} has a model already (delete it, or give another folder)")
    loss = make_model(options.folder, seed=options.seed)
    print(json.dumps({"model": str(options.folder), "loss": round(loss, 3)}))


if __name__ == "__main__":
    main()
