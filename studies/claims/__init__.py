"""The paper's claims on a real model: see README.md."""
