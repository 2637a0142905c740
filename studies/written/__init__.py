"""Written answers: what smoothing and temperatures do to the confidence of answers.

training   trains and scores runs and temperature heads, on a GPU, and packs their records
tables     the tables of README.md, from the records, without one
"""
