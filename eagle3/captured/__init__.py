"""States of answers that were captured while the target wrote them (eagle3/corpus/capture.py)."""
