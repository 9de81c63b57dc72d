"""MEDEC's official scores for any system's predictions, with intervals and the floors to beat
(docs/evaluation.md).
"""
