"""Shared by all tests. Two seams are faked: the LLM server client, and the tokenizer where exact ids matter."""

import verl  # noqa: F401  # loads the plugin, as every run does
