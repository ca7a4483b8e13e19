"""What operators see and do: the live page, `top`, health, pods, explanations, resets."""
