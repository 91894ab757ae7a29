"""Text and conversations of one's own, from a place to sequences.

`places` finds files; `reading`, `rows`, `written` and `published` read them, `forms` and `messages` make one form of
all, `tokenizer`, `tokenizer_file` and `chat` make tokens; `preparing` keeps them and `prepared` opens what was kept;
`windows` cuts sequences, which `text` gives a run and `mixture` mixes. `refusals` and `header_lines` are what it says,
`pairs` are the preference pairs of `examples/dpo.py`, and `prompts` what a trained model is asked.
"""
