"""Train from a checkout: ``python train.py method=diffusion_nft card=wan21``. Everything is in fastvideo_train.app."""

from fastvideo_train.app import main

if __name__ == "__main__":
    main()
