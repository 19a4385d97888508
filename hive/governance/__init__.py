"""Operations that need more than one person's word: tokens, signatures, rules.

Pure: facts and `now` come in as arguments; of the rest of Hive it knows the leaves. The doer is control/governance.py.
Begin with verdict.py.
"""
