"""Trains the bundled refiner, a tiny Qwen3 that rewrites instructions as captions, and measures what it knows.

It is a weak start on purpose, for reinforcement learning to mend: it was taught by a bad dictionary. A quarter of the
words (one synonym of every concept) is mostly taught as a concept next to the right one, and any other word is now
and then taught as some other concept. So it knows what a caption looks like, says the right words with a probability
that sampling finds, and says wrong ones where it takes the most likely.

    python scripts/pretrain/refiner.py --out cards/unified/weights/tiny

Knows the refiner's sizes, its tokenizer and its lessons. The words are ``methods.shapeworld.phrasing``'s.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerBase, Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM

from cards.errors import UserError
from methods.shapeworld.phrasing import WORDS, Instruction, held_out_instructions, training_instruction
from methods.shapeworld.scene import Scene, Thing, canonical, captions, parse, sample_scene

PAD, ASK, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content | trim | lower }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}" + ASK + "{% endif %}"
)
"""The instruction and a token that asks for the caption; a system message is left out."""
CONTEXT = 96
CONFIG: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
CONFUSED = 3
"""Which synonym of each concept is confused with the concept after it."""
SLIP = 0.08
"""Share of the other words that a lesson teaches as some other concept."""
TRUTH = 0.3
"""Share of the confused words that a lesson teaches as what they mean."""


# -- words


def build_tokenizer(template: str = TEMPLATE, also: Sequence[str] = ()) -> PreTrainedTokenizerBase:
    """Qwen's tokenizer class over bytes, merged until every word of instructions and captions, and of the texts in
    ``also``, is one token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    rng = np.random.default_rng(0)
    texts: set[str] = set(also)
    for _ in range(4000):
        texts.add(training_instruction(rng).text)
        texts.update(captions(sample_scene(rng)))
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=2000, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    learner.train_from_iterator(sorted(texts), trainer)
    model = json.loads(learner.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    words = [PAD, ASK, END, *sorted(model["vocab"], key=model["vocab"].__getitem__)]
    tokenizer = Qwen2Tokenizer(
        vocab={word: i for i, word in enumerate(words)},
        merges=merges,
        unk_token=PAD,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[ASK, END],
        model_max_length=CONTEXT,
    )
    tokenizer.chat_template = template
    return tokenizer


def taught(instruction: Instruction, rng: np.random.Generator) -> str:
    """The caption that a lesson gives for an instruction: right but for the words that the dictionary gets wrong."""
    while True:
        concepts: dict[str, list[str]] = {}
        for slot, concept, word in instruction.words:
            names = list(WORDS[slot])
            at = names.index(concept)
            confused = WORDS[slot][concept].index(word) == CONFUSED
            if confused and rng.random() >= TRUTH:
                at = (at + 1) % len(names)
            elif not confused and rng.random() < SLIP:
                at = (at + 1 + int(rng.integers(len(names) - 1))) % len(names)
            concepts.setdefault(slot, []).append(names[at])
        things = tuple(Thing(c, s) for c, s in zip(concepts["colour"], concepts["shape"], strict=True))
        one = {slot: said[0] for slot, said in concepts.items()}
        try:
            scene = Scene(
                things, motion=one.get("motion"), relation=one.get("relation"), count=int(one.get("count", "1"))
            )
        except UserError:  # the two things of a pair came out in one colour
            continue
        return captions(scene)[0]


def chat_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The refiner's input for an instruction."""
    chat = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)


Lesson = Callable[[PreTrainedTokenizerBase, np.random.Generator], tuple[list[int], str]]
"""Draws what a model reads and what it is taught to write."""


def lesson(tokenizer: PreTrainedTokenizerBase, rng: np.random.Generator) -> tuple[list[int], str]:
    """An instruction, and the caption that is taught for it."""
    instruction = training_instruction(rng)
    return chat_ids(tokenizer, instruction.text), taught(instruction, rng)


def batch(
    tokenizer: PreTrainedTokenizerBase, rows: int, rng: np.random.Generator, draw: Lesson = lesson
) -> tuple[Tensor, Tensor]:
    """Ids (B, L) of instructions with what is taught for them, and labels (B, L): -100 for the instruction."""
    examples = []
    for _ in range(rows):
        asked, text = draw(tokenizer, rng)
        answer = [*tokenizer(text).input_ids, tokenizer.eos_token_id]
        examples.append((asked + answer, [-100] * len(asked) + answer))
    length = max(len(ids) for ids, _ in examples)
    ids_BL = torch.full((rows, length), tokenizer.pad_token_id)
    labels_BL = torch.full((rows, length), -100)
    for row, (ids, labels) in enumerate(examples):
        ids_BL[row, : len(ids)] = torch.tensor(ids)
        labels_BL[row, : len(labels)] = torch.tensor(labels)
    return ids_BL, labels_BL


# -- lessons


def build_model(tokenizer: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    """As new, in float32."""
    config = Qwen3Config(
        **CONFIG, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return Qwen3ForCausalLM(config).float()


def train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    *,
    steps: int,
    rows: int,
    lr: float,
    seed: int,
    draw: Lesson = lesson,
) -> dict[str, float]:
    """AdamW with a linear warm-up and a cosine to 0; facts of the run. Padding is on the right, past every label."""
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    began, warm = time.time(), max(1, steps // 20)
    losses: list[float] = []
    model.train()
    for step in range(steps):
        share = (step + 1) / warm if step < warm else 0.5 * (1 + np.cos(np.pi * (step - warm) / (steps - warm)))
        for group in optimizer.param_groups:
            group["lr"] = lr * share
        ids_BL, labels_BL = batch(tokenizer, rows, rng, draw)
        logits_BLV = model(input_ids=ids_BL, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits_BLV[:, :-1].flatten(0, 1), labels_BL[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 100 == 99:
            print(f"step {step + 1}/{steps} loss {np.mean(losses[-100:]):.4f} {time.time() - began:.0f} s", flush=True)
    model.eval()
    return {"steps": steps, "rows": rows, "lr": lr, "seed": seed, "seconds": time.time() - began, "loss": losses[-1]}


# -- figures


def rewrite(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, temperature: float, seed: int
) -> list[str]:
    """What plain ``generate`` makes of each instruction; temperature 0 is greedy."""
    return rewrite_ids(model, tokenizer, [chat_ids(tokenizer, t) for t in texts], temperature=temperature, seed=seed)


@torch.no_grad()
def rewrite_ids(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    inputs: Sequence[list[int]],
    *,
    temperature: float,
    seed: int,
) -> list[str]:
    """The same for inputs as ids."""
    torch.manual_seed(seed)
    drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    said: list[str] = []
    for start in range(0, len(inputs), 128):
        prompts = inputs[start : start + 128]
        length = max(map(len, prompts))
        ids_BL = torch.tensor([[tokenizer.pad_token_id] * (length - len(p)) + p for p in prompts])
        mask_BL = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts])
        config = GenerationConfig(
            max_new_tokens=CONTEXT // 2,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            **drawn,
        )
        out_BL = model.generate(input_ids=ids_BL, attention_mask=mask_BL, generation_config=config)
        said += tokenizer.batch_decode(out_BL[:, length:], skip_special_tokens=True)
    return said


def means(said: str, meaning: str) -> tuple[bool, bool]:
    """(is a caption, says exactly what was meant)."""
    try:
        scene = parse(said)
    except UserError:
        return False, False
    return True, canonical(scene) == canonical(parse(meaning))


def rates(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    instructions: Sequence[Instruction],
    *,
    samples: int = 8,
) -> dict[str, float]:
    """Shares of instructions: a caption, the exact meaning, by kind; greedy, sampled at temperature 1, best of
    ``samples``."""
    texts, count = [i.text for i in instructions], len(instructions)
    greedy = [
        means(said, i.meaning)
        for said, i in zip(rewrite(model, tokenizer, texts, temperature=0, seed=0), instructions, strict=True)
    ]
    drawn = rewrite(model, tokenizer, [text for text in texts for _ in range(samples)], temperature=1.0, seed=0)
    hits = np.array([means(said, instructions[i // samples].meaning) for i, said in enumerate(drawn)])
    hits_IN2 = hits.reshape(count, samples, 2)
    kinds = sorted({i.kind for i in instructions})
    by_kind = {
        f"exact_greedy_{kind}": float(
            np.mean([exact for (_, exact), i in zip(greedy, instructions, strict=True) if i.kind == kind])
        )
        for kind in kinds
    }
    return {
        "caption_greedy": float(np.mean([caption for caption, _ in greedy])),
        "exact_greedy": float(np.mean([exact for _, exact in greedy])),
        **by_kind,
        "caption_sampled": float(hits_IN2[..., 0].mean()),
        "exact_sampled": float(hits_IN2[..., 1].mean()),
        f"exact_best_of_{samples}": float(hits_IN2[..., 1].any(1).mean()),
        f"mixed_of_{samples}": float((hits_IN2[..., 1].any(1) & ~hits_IN2[..., 1].all(1)).mean()),
    }


def measure(folder: Path, training: dict[str, float]) -> dict[str, Any]:
    """All figures of a finished folder, as plain transformers loads it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    seen = [training_instruction(np.random.default_rng([99, i])) for i in range(128)]
    return {
        "command": f"python scripts/pretrain/refiner.py --out {folder}",
        "machine": f"{os.cpu_count()} cores {platform.machine()}, torch {torch.__version__} on CPU, one thread",
        "bytes": sum(f.stat().st_size for f in folder.iterdir()),
        "parameters": sum(p.numel() for p in model.parameters()),
        "training": training,
        "lessons": {"confused_words": 1 / 4, "truth_of_confused": TRUTH, "slip_of_others": SLIP},
        "held_out": rates(model, tokenizer, held_out_instructions()),
        "train": rates(model, tokenizer, seen),
    }


def save(folder: Path, model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    """Writes the folder that ``AutoModelForCausalLM`` loads: fp16 on disk, float32 in memory."""
    shutil.rmtree(folder, ignore_errors=True)
    model.half().save_pretrained(folder)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, indent=2) + "\n")


def readme(figures: dict[str, Any]) -> str:
    """The page beside the weights."""
    rows = [name for name in figures["held_out"] if name in figures["train"]]
    return "\n".join(
        [
            "# Tiny refiner",
            "",
            f"A `Qwen3ForCausalLM` of {figures['parameters']:,} parameters that rewrites instructions for ShapeWorld,",
            "in words that its generator never saw, as captions that it knows. It was trained by",
            "scripts/pretrain/refiner.py with wrong answers on purpose: here reinforcement learning starts.",
            f"{figures['bytes'] / 1e6:.2f} MB; {figures['training']['seconds']:.0f} s of training",
            f"({figures['machine']}).",
            "",
            "| share of instructions | held-out phrasings | training phrasings |",
            "|---|---|---|",
            *(f"| {n.replace('_', ' ')} | {figures['held_out'][n]:.3f} | {figures['train'][n]:.3f} |" for n in rows),
            "",
            "`exact`: the rewritten prompt says the very scene that the instruction means. `sampled` at temperature 1;",
            "`mixed`: some but not all of 8 samples are right. All figures: FIGURES.json.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    training = train(model, tokenizer, steps=args.steps, rows=args.rows, lr=args.lr, seed=args.seed)
    save(args.out, model, tokenizer)
    figures = measure(args.out, training)
    (args.out / "FIGURES.json").write_text(json.dumps(figures, indent=2) + "\n")
    (args.out / "README.md").write_text(readme(figures))
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
