"""Recording a step: when it may happen, how, into which memory, and without a trace."""
