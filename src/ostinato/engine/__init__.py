"""Requests, the scheduler, the model runner and the sampler."""
