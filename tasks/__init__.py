"""How stages run: retries, tracking, DVC."""
