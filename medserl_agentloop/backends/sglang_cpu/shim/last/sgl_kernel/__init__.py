"""Stands in for SGLang's kernels where they are not installed: their wheels need an accelerator.

It offers nothing but ``kvcacheio`` on purpose: SGLang takes a name that it can import for a feature it has.
"""
