"""Rewards: one file a reward, all behind ``reward.Reward``.

A reward turns a batch of decoded videos and their prompts into one number a sample. A sample that cannot be scored is
masked (NaN) and counted, never turned into a number and never fatal. ``conf/reward/`` is the menu and
``build.build_reward`` makes the object.
"""
