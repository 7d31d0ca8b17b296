"""How answers are scored: in killable processes, never in the main one."""
