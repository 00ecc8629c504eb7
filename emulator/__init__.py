"""AWS on this machine: a moto server with our own, stricter CloudFormation, for rehearsals and tests."""
