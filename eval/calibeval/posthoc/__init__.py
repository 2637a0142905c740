"""Post-hoc calibrators: a temperature for every answer, fitted after training on other questions.

    log P(token) = log_softmax(logits / τ),   τ = exp(head(hidden states))

One head is a constant (temperature scaling, Guo et al. 2017), the others read the frozen model's
last hidden states (Adaptive Temperature Scaling, Xie et al. 2024, arXiv 2409.19817). A positive
temperature never changes the order of the tokens, so accuracy stays what it was.
"""
