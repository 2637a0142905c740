"""How a model is asked: from a data set's questions to records of what it answers.

request      what a user may ask for: `Request`, and `Task` of each data set
task_files   task files, the built-in ones (`builtin_tasks/`) among them
tasks        a task's data, as questions
questions    a question with its choices, and its subject
prompts      the text that is put before a question, by letters or by texts
written      answers that the model writes
adaptive     a temperature for each token, and the engine that scores with it
chat         the same as a conversation, by a model's chat template
engines/     what gives log-probabilities: transformers or vLLM
model_digest what tells a model's weights from others'
scoring      `score`, which does all of this and writes the records
"""
