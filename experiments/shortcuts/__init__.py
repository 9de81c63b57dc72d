"""Study what an assessor learns when rewritten notes show their author, and some errors cannot be
known.
"""
