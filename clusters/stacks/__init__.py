"""CloudFormation stacks: what they are made of (one module per stack) and how they are deployed and deleted."""
