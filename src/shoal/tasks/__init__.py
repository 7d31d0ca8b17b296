"""Where tasks come from and how rollouts are run on them."""
