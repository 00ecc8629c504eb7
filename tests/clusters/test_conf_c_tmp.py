from pathlib import Path
import pytest
from clusters.aws import Site
from clusters.base import Cluster
from tests.clusters.batch_yard import batch
from tests.clusters.sagemaker_yard import sagemaker
from tests.clusters.test_conformance import *  # noqa: F403
ADAPTERS = {"batch": batch, "sagemaker": sagemaker}
@pytest.fixture(params=ADAPTERS)
def cluster(request, tmp_path: Path, site: Site) -> Cluster:
    return ADAPTERS[request.param](tmp_path)
