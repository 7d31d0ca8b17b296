"""What interrupting answers at a new Version gains over waiting for them: AReaL's ablation."""
