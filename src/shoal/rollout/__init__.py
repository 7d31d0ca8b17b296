"""Rollouts: starts tasks, holds their conversations and hands finished groups on."""
