"""Rollouts: who starts a task, holds its conversation and hands its group on."""
