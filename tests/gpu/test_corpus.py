"""The programs of `corpus`, on CUDA."""

from corpus.test_corpus import *  # noqa: F403
