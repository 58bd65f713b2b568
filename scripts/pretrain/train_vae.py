"""Trains the bundled tiny Wan VAE on ShapeWorld: first on single frames, then on whole clips.

Knows the VAE's configuration and its losses. Leaves the transformer to ``train_base.py``.

Two things matter. Started on clips, the VAE hardly moves; started on single frames it does. And the public ``decode``
clamps to [-1, 1], which kills the gradient outside, so the loss reads the decoder's output before the clamp.

    python scripts/pretrain/train_vae.py --out build/pretrain/vae
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, WanRMS_norm
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from torch import Tensor, nn

from methods.shapeworld.heldout import training_scene
from methods.shapeworld.render import render

# Shapes: B batch, C channels (3 RGB), T frames, H x W pixels; latents have Z channels and a cell a 4x4x4 block.

VAE_CONFIG = {
    "base_dim": 16,
    "z_dim": 8,
    "dim_mult": [1, 2, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [True, True],
    "scale_factor_spatial": 4,
    "scale_factor_temporal": 4,
    "latents_mean": [0.0] * 8,
    "latents_std": [1.0] * 8,
}
KL_WEIGHT = 1e-6
POLISH_NOISE = 0.25  # at most, in units of a latent channel's standard deviation


def to_tensor(clips_BTHWC: np.ndarray) -> Tensor:
    """uint8 clips -> float (B, C, T, H, W) in [-1, 1], as diffusers' video processor scales them."""
    return torch.from_numpy(clips_BTHWC).permute(0, 4, 1, 2, 3).contiguous().float() / 127.5 - 1.0


def decode_unclamped(vae: AutoencoderKLWan, z_BZTHW: Tensor) -> Tensor:
    """``vae.decode`` without its clamp to [-1, 1]."""
    vae.clear_cache()
    x = vae.post_quant_conv(z_BZTHW)
    chunks = []
    for i in range(x.shape[2]):
        vae._conv_idx = [0]
        cell = x[:, :, i : i + 1]
        first = {"first_chunk": True} if i == 0 else {}
        chunks.append(vae.decoder(cell, feat_cache=vae._feat_map, feat_idx=vae._conv_idx, **first))
    vae.clear_cache()
    return torch.cat(chunks, dim=2)


@torch.no_grad()
def inflate(vae: AutoencoderKLWan) -> None:
    """Makes the VAE start as one that codes each block of frames by its last frame, held still.

    Single frames never reach the older taps of the causal convolutions, so these would enter the clip phase at
    random. They start at zero instead, and the convolutions that halve and double the frame rate as copies.
    """
    for name, module in vae.named_modules():
        if isinstance(module, WanCausalConv3d) and module.kernel_size[0] == 3:
            if name.endswith("time_conv"):
                copies = module.out_channels // module.in_channels  # 2 where the frame rate doubles
                eye = torch.eye(module.in_channels).repeat(copies, 1)
                module.weight.zero_()
                module.weight[:, :, -1, 0, 0] = eye
                module.bias.zero_()
            else:
                module.weight[:, :, :-1] = 0.0


def loss_of(vae: AutoencoderKLWan, x_BCTHW: Tensor, frozen_encoder: bool = False) -> tuple[Tensor, float]:
    """Training loss and the mean squared error (pixels in [-1, 1]) of one batch.

    A frozen encoder's latents get up to POLISH_NOISE of noise, not the posterior's: generated latents are a little
    off as well, and the decoder learns to bring them back to clean shapes.
    """
    if frozen_encoder:
        with torch.no_grad():
            mode = DiagonalGaussianDistribution(vae._encode(x_BCTHW)).mode()
        level = POLISH_NOISE * torch.rand(len(mode), 1, 1, 1, 1)
        noise = level * mode.std(dim=(0, 2, 3, 4), keepdim=True) * torch.randn_like(mode)
        out = decode_unclamped(vae, mode + noise)
        penalty = 0.0
    else:
        posterior = DiagonalGaussianDistribution(vae._encode(x_BCTHW))
        out = decode_unclamped(vae, posterior.sample())
        penalty = KL_WEIGHT * posterior.kl().mean()
    error = out - x_BCTHW
    mse = error.square().mean()
    return mse + 0.1 * error.abs().mean() + penalty, float(mse.detach())


def psnr(mse: float) -> float:
    """Decibels, for pixels in [-1, 1] (peak-to-peak 2)."""
    return 10.0 * math.log10(4.0 / mse)


def clip_batches(count: int, batch: int, frames: int, rng: np.random.Generator) -> Iterator[Tensor]:
    """Endless batches of ``frames`` consecutive frames from a pool of ``count`` rendered 9-frame clips."""
    pool = np.stack([render(training_scene(rng), rng) for _ in range(count)])
    while True:
        rows = rng.integers(count, size=batch)
        start = rng.integers(pool.shape[1] - frames + 1, size=batch)
        yield to_tensor(np.stack([pool[r, s : s + frames] for r, s in zip(rows, start, strict=True)]))


class FastNorm(nn.Module):
    """WanRMS_norm without its strided vector norm, a quarter of a training step's time; same parameter, same values."""

    def __init__(self, norm: WanRMS_norm) -> None:
        super().__init__()
        self.gamma = norm.gamma

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + 1e-12) * self.gamma


def use_fast_norms(module: nn.Module) -> None:
    """Replaces every WanRMS_norm below ``module``."""
    for name, child in list(module.named_children()):
        if isinstance(child, WanRMS_norm):
            setattr(module, name, FastNorm(child))
        else:
            use_fast_norms(child)


class AdamPhase:
    """AdamW on everything."""

    def __init__(self, vae: AutoencoderKLWan, lr: float) -> None:
        self.optimizer = torch.optim.AdamW(vae.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.0)
        self.lr = lr

    def step(self, share: float) -> None:
        """One update at ``share`` of the base learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * share
        self.optimizer.step()


class MuonPhase:
    """Muon on the convolution kernels, each flattened to (out, rest), and AdamW on what remains.

    At the same loss it bears far larger steps than AdamW does here, and ends several dB higher.
    """

    def __init__(self, vae: AutoencoderKLWan, lr: float, adam_lr: float = 1e-3) -> None:
        trained = [p for p in vae.parameters() if p.requires_grad]
        kernels = [p for p in trained if p.ndim >= 4 and p.shape[0] >= 8 and p[0].numel() >= 8]
        chosen = {id(p) for p in kernels}
        self.pairs = [(p, nn.Parameter(p.data.view(p.shape[0], -1))) for p in kernels]  # views of one storage
        self.muon = torch.optim.Muon([flat for _, flat in self.pairs], lr=lr, weight_decay=0.0)
        rest = [p for p in trained if id(p) not in chosen]
        self.adam = torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.99), weight_decay=0.0)
        self.lr, self.adam_lr = lr, adam_lr

    def step(self, share: float) -> None:
        """One update at ``share`` of the base learning rates."""
        for kernel, flat in self.pairs:
            flat.grad = kernel.grad.view_as(flat)
        for optimizer, lr in ((self.muon, self.lr), (self.adam, self.adam_lr)):
            for group in optimizer.param_groups:
                group["lr"] = lr * share
            optimizer.step()


def run_phase(
    vae: AutoencoderKLWan,
    batches: Iterator[Tensor],
    optimizer: AdamPhase | MuonPhase,
    *,
    name: str,
    steps: int,
    final_share: float,
    out: Path,
    frozen_encoder: bool = False,
) -> None:
    """``steps`` updates with a short warm-up and a cosine down to ``final_share`` of the learning rate.

    Ends with the weights' running average over the last hundred steps or so.
    """
    began = time.time()
    recent: list[float] = []
    average = {key: value.clone() for key, value in vae.state_dict().items()}
    for step in range(steps):
        progress = step / max(steps - 1, 1)
        share = final_share + 0.5 * (1.0 - final_share) * (1.0 + math.cos(math.pi * progress))
        with torch.autocast("cpu", torch.bfloat16):
            loss, mse = loss_of(vae, next(batches), frozen_encoder)
        vae.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step(share * min(1.0, (step + 1) / 50))
        with torch.no_grad():
            for key, value in vae.state_dict().items():
                average[key].lerp_(value, 0.02)
        recent = [*recent[-49:], mse]
        if step % 50 == 49:
            mean = psnr(sum(recent) / len(recent))
            print(f"{name} {step + 1}/{steps} psnr {mean:.2f} dB, {time.time() - began:.0f} s", flush=True)
        if step % 200 == 199:
            vae.save_pretrained(out)
    vae.load_state_dict(average)
    vae.save_pretrained(out)


@torch.no_grad()
def measure_latents(vae: AutoencoderKLWan, clips: Tensor) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each latent channel over ``clips``, of posterior samples.

    Samples, not modes: in a channel that the decoder ignores the posterior is the prior, and scaled by the little that
    its mode varies it would reach the transformer as loud, useless noise.
    """
    drawn = torch.cat([vae.encode(part).latent_dist.sample() for part in clips.split(64)])
    flat = drawn.transpose(0, 1).flatten(1)
    return flat.mean(dim=1).tolist(), flat.std(dim=1).tolist()


@torch.no_grad()
def reconstruct_mse(vae: AutoencoderKLWan, clips: Tensor) -> float:
    """Mean squared error of the public encode (mode) and decode."""
    parts = [(vae.decode(vae.encode(p).latent_dist.mode()).sample - p).square().mean() for p in clips.split(50)]
    return float(torch.stack(parts).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--frame-steps", type=int, default=850, help="steps of 32 single frames")
    parser.add_argument("--clip-steps", type=int, default=1500, help="AdamW steps of 4 clips of 9 frames")
    parser.add_argument("--muon-steps", type=int, default=2400, help="Muon steps of 4 clips of 9 frames")
    parser.add_argument("--muon-lr", type=float, default=6e-3)
    parser.add_argument("--polish-steps", type=int, default=500, help="further steps of the decoder alone")
    parser.add_argument("--polish-lr", type=float, default=2e-3)
    parser.add_argument("--start", type=Path, help="folder of a VAE to go on from; skips to Muon")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    began = time.time()
    vae = AutoencoderKLWan(**VAE_CONFIG)
    # The posterior's log variance starts at -6: with the default 0, noise drowns the latents and nothing is learnt.
    torch.nn.init.constant_(vae.quant_conv.bias[vae.config.z_dim :].data, -6.0)
    inflate(vae)
    print(f"{sum(p.numel() for p in vae.parameters())} parameters", flush=True)
    use_fast_norms(vae)
    if args.start is None:
        frames = clip_batches(4000, 32, 1, rng)
        adam = AdamPhase(vae, 2e-3)
        run_phase(vae, frames, adam, name="frames", steps=args.frame_steps, final_share=0.2, out=args.out)
        clips = clip_batches(4000, 4, 9, rng)
        adam = AdamPhase(vae, 1.5e-3)
        run_phase(vae, clips, adam, name="clips", steps=args.clip_steps, final_share=0.03, out=args.out)
    else:
        vae.load_state_dict(AutoencoderKLWan.from_pretrained(args.start).state_dict())
    clips = clip_batches(4000, 4, 9, rng)
    if args.muon_steps:
        muon = MuonPhase(vae, args.muon_lr)
        run_phase(vae, clips, muon, name="muon", steps=args.muon_steps, final_share=0.02, out=args.out)
    if args.polish_steps:
        vae.encoder.requires_grad_(False)
        vae.quant_conv.requires_grad_(False)
        muon = MuonPhase(vae, args.polish_lr)
        run_phase(
            vae,
            clips,
            muon,
            name="polish",
            steps=args.polish_steps,
            final_share=0.02,
            out=args.out,
            frozen_encoder=True,
        )
    vae = AutoencoderKLWan.from_pretrained(args.out).half().float()  # what is stored is what is measured

    fresh = next(clip_batches(1024, 1024, 9, np.random.default_rng(args.seed + 1)))
    if args.muon_steps:
        mean, std = measure_latents(vae, fresh)
    else:  # the encoder is the one that was started from, and a transformer may know its statistics
        started = AutoencoderKLWan.load_config(args.start)
        mean, std = started["latents_mean"], started["latents_std"]
    vae.register_to_config(latents_mean=mean, latents_std=std)
    vae.save_pretrained(args.out)
    figures = {
        "psnr_clips_db": psnr(reconstruct_mse(vae, fresh[:200])),
        "psnr_frames_db": psnr(reconstruct_mse(vae, fresh[:200, :, :1])),
        "seconds": time.time() - began,
        "steps": {
            "frames": args.frame_steps,
            "clips": args.clip_steps,
            "muon": args.muon_steps,
            "polish": args.polish_steps,
        },
        "seed": args.seed,
    }
    (args.out / "vae.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
