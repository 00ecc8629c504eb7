"""What is measured rather than tested: ratios against a peer in the same run, each by one command."""
