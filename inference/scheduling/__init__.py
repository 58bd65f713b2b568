"""Policies of the scheduler, one file each: who takes the next step, and in which order requests wait for admission.

They see opaque entries with predicted seconds; they know nothing of tensors, models or budgets of memory.
"""
