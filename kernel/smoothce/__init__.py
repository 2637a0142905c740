"""Label-smoothed linear cross-entropy whose logits are never materialised."""
