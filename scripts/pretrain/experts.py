"""Trains the bundled base of a chain of experts: one tiny Qwen3 that makes one attribute of an instruction plain.

Which attribute it is told by the chat's system message, so the experts of a chain begin as the same weights and part
when they are trained. It is a weak start, taught by the bad dictionary of ``scripts/pretrain/refiner.py``. Of the other
attributes half are plain already in what it reads, so that the experts can stand in any order.

    python scripts/pretrain/experts.py --out cards/multi_expert/weights/tiny
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

from cards.errors import UserError
from cards.multi_expert.card import system_of
from methods.shapeworld.attributes import ATTRIBUTES, partly_plain, with_words
from methods.shapeworld.phrasing import WORDS, Instruction, held_out_instructions, training_instruction
from scripts.pretrain.refiner import (
    ASK,
    CONFUSED,
    SLIP,
    TRUTH,
    build_model,
    build_tokenizer,
    means,
    rewrite_ids,
    save,
    train,
)

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'system' and 'words of ' in m.content %}{{ m.content.split('words of ')[1].split(' ')[0] }}: "
    "{% elif m.role == 'user' %}{{ m.content | trim | lower }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}" + ASK + "{% endif %}"
)
"""The attribute, the instruction and a token that asks for the text."""


def chat_ids(tokenizer: PreTrainedTokenizerBase, attribute: str, text: str) -> list[int]:
    """The input of an expert for a text."""
    chat = [{"role": "system", "content": system_of(attribute)}, {"role": "user", "content": text}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


def mistaken(instruction: Instruction, attribute: str, rng: np.random.Generator) -> Instruction:
    """As the dictionary has it: some words of the attribute mean other concepts."""
    while True:
        words = []
        for slot, concept, word in instruction.words:
            names = list(WORDS[slot])
            at = names.index(concept)
            if slot in ATTRIBUTES[attribute]:
                confused = WORDS[slot][concept].index(word) == CONFUSED
                if confused and rng.random() >= TRUTH:
                    at = (at + 1) % len(names)
                elif not confused and rng.random() < SLIP:
                    at = (at + 1 + int(rng.integers(len(names) - 1))) % len(names)
            words.append((slot, names[at], word))
        try:
            return with_words(instruction, tuple(words))
        except UserError:  # the two things of a pair came out in one colour
            continue


def lesson(tokenizer: PreTrainedTokenizerBase, rng: np.random.Generator) -> tuple[list[int], str]:
    """A text of which some attributes are plain, and the same with one more."""
    attribute = list(ATTRIBUTES)[int(rng.integers(len(ATTRIBUTES)))]
    plain = {name for name in ATTRIBUTES if name != attribute and rng.random() < 0.5}
    instruction = training_instruction(rng)
    answer = partly_plain(mistaken(instruction, attribute, rng), plain | {attribute})
    return chat_ids(tokenizer, attribute, partly_plain(instruction, plain)), answer


def rates(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, instructions: Sequence[Instruction], samples: int = 8
) -> dict[str, float]:
    """Shares of instructions: each attribute made plain rightly where those before it are, greedily and drawn at
    temperature 1; the exact meaning at the end of the whole chain."""
    names, found = list(ATTRIBUTES), {}
    for i, attribute in enumerate(names):
        right = [partly_plain(one, names[: i + 1]) for one in instructions]
        ids = [chat_ids(tokenizer, attribute, partly_plain(one, names[:i])) for one in instructions]
        greedy = rewrite_ids(model, tokenizer, ids, temperature=0, seed=0)
        drawn = rewrite_ids(model, tokenizer, [row for row in ids for _ in range(samples)], temperature=1.0, seed=0)
        found[f"{attribute}_greedy"] = float(np.mean([a == b for a, b in zip(greedy, right, strict=True)]))
        found[f"{attribute}_sampled"] = float(np.mean([said == right[j // samples] for j, said in enumerate(drawn)]))
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        texts = [one.text for one in instructions]
        for i, attribute in enumerate(names):
            ids = [chat_ids(tokenizer, attribute, text) for text in texts]
            texts = rewrite_ids(model, tokenizer, ids, temperature=temperature, seed=i)
        ends = np.array([means(text, one.meaning) for text, one in zip(texts, instructions, strict=True)])
        found |= {f"chain_caption_{name}": float(ends[:, 0].mean()), f"chain_exact_{name}": float(ends[:, 1].mean())}
    return found


def measure(folder: Path, training: dict[str, float]) -> dict[str, Any]:
    """All figures of a finished folder, as plain transformers loads it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    return {
        "command": f"python scripts/pretrain/experts.py --out {folder}",
        "machine": f"{os.cpu_count()} cores {platform.machine()}, torch {torch.__version__} on CPU, one thread",
        "bytes": sum(f.stat().st_size for f in folder.iterdir()),
        "parameters": sum(p.numel() for p in model.parameters()),
        "training": training,
        "lessons": {"confused_words": 1 / 4, "truth_of_confused": TRUTH, "slip_of_others": SLIP},
        "held_out": rates(model, tokenizer, held_out_instructions()),
        "train": rates(model, tokenizer, [training_instruction(np.random.default_rng([99, i])) for i in range(128)]),
    }


def readme(figures: dict[str, Any]) -> str:
    """The page beside the weights."""
    return "\n".join(
        [
            "# Tiny base of experts",
            "",
            f"A `Qwen3ForCausalLM` of {figures['parameters']:,} parameters that makes one attribute of an instruction",
            "for ShapeWorld plain; the chat's system message says which. Experts of the card `multi_expert` begin as",
            "it. It was trained by scripts/pretrain/experts.py with wrong answers on purpose: here reinforcement",
            "learning starts.",
            f"{figures['bytes'] / 1e6:.2f} MB; {figures['training']['seconds']:.0f} s of training on one thread of a "
            "busy machine.",
            "",
            "| share of instructions | held-out phrasings | training phrasings |",
            "|---|---|---|",
            *(
                f"| {n.replace('_', ' ')} | {value:.3f} | {figures['train'][n]:.3f} |"
                for n, value in figures["held_out"].items()
            ),
            "",
            "`colour`, `shape`, `motion`: the text is the right one where the attributes before it are plain. `chain`:",
            "all three one after the other; `exact`: the last text says the very scene that the instruction means.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer(TEMPLATE, [f"{attribute}: " for attribute in ATTRIBUTES])
    model = build_model(tokenizer)
    training = train(model, tokenizer, steps=args.steps, rows=args.rows, lr=args.lr, seed=args.seed, draw=lesson)
    save(args.out, model, tokenizer)
    figures = measure(args.out, training)
    (args.out / "FIGURES.json").write_text(json.dumps(figures, indent=2) + "\n")
    (args.out / "README.md").write_text(readme(figures))
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
