"""The GRPO update: capture a prompt once, replay its branches one by one."""
