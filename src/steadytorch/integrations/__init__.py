"""Integrations with other libraries; `import steadytorch` imports none of them."""
