"""The API of `trl vllm-serve`, which TRL's trainers speak up to 1.10: rollouts, and weights one by one."""
