"""The engine: requests, the scheduler, the model runner and the sampler."""
