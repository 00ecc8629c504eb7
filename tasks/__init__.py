"""The retryable steps and what people see of them, by subject: image, stack, data and model, job, report."""
