"""Objects come back as they went in, whole or in ranges, however they were uploaded."""

import io
from typing import Any

import pytest
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError

from clusters.aws import Site
from tests.sky import client

SIZE = 12 * 2**20 + 17
BODY = b"".join(number.to_bytes(4, "big") for number in range(SIZE // 4 + 1))[:SIZE]
PARTS = TransferConfig(multipart_threshold=2**20, multipart_chunksize=5 * 2**20)


@pytest.fixture
def s3(site: Site) -> Any:
    found = client("s3", site.endpoint)
    found.create_bucket(Bucket="bulky")
    return found


def test_an_upload_in_parts_comes_back_whole_and_in_ranges(s3: Any) -> None:
    s3.upload_fileobj(io.BytesIO(BODY), "bulky", "a/model of mine+1", Config=PARTS)
    reply = s3.get_object(Bucket="bulky", Key="a/model of mine+1")
    assert reply["Body"].read() == BODY
    assert (reply["ContentLength"], reply["ETag"][-3:-1]) == (SIZE, "-3")
    back = io.BytesIO()
    s3.download_fileobj("bulky", "a/model of mine+1", back, Config=PARTS)
    assert back.getvalue() == BODY
    for asked, told in {"5-9": BODY[5:10], "-7": BODY[-7:], f"{SIZE - 3}-": BODY[-3:], "0-99999999": BODY}.items():
        reply = s3.get_object(Bucket="bulky", Key="a/model of mine+1", Range=f"bytes={asked}")
        assert reply["Body"].read() == told
        assert reply["ResponseMetadata"]["HTTPStatusCode"] == 206
    assert reply["ContentRange"] == f"bytes 0-{SIZE - 1}/{SIZE}"
    with pytest.raises(ClientError, match="InvalidRange"):
        s3.get_object(Bucket="bulky", Key="a/model of mine+1", Range=f"bytes={SIZE}-")


def test_what_is_not_there_and_what_is_not_asked_for_is_told_as_ever(s3: Any) -> None:
    reply = s3.put_object(Bucket="bulky", Key="k", Body=b"one", Metadata={"colour": "red"}, ContentType="text/x")
    told = s3.get_object(Bucket="bulky", Key="k")
    assert (told["Metadata"], told["ContentType"], told["Body"].read()) == ({"colour": "red"}, "text/x", b"one")
    with pytest.raises(s3.exceptions.NoSuchKey):
        s3.get_object(Bucket="bulky", Key="absent")
    with pytest.raises(ClientError, match=r"304|Not Modified"):
        s3.get_object(Bucket="bulky", Key="k", IfNoneMatch=reply["ETag"])
    with pytest.raises(ClientError, match=r"PreconditionFailed|412"):
        s3.get_object(Bucket="bulky", Key="k", IfMatch='"other"')
    s3.put_object(Bucket="bulky", Key="empty", Body=b"")
    assert s3.get_object(Bucket="bulky", Key="empty")["Body"].read() == b""
    assert s3.get_object_tagging(Bucket="bulky", Key="k")["TagSet"] == []


def test_every_version_is_kept(s3: Any) -> None:
    s3.create_bucket(Bucket="versions")
    s3.put_bucket_versioning(Bucket="versions", VersioningConfiguration={"Status": "Enabled"})
    names = [s3.put_object(Bucket="versions", Key="k", Body=body)["VersionId"] for body in (b"one", b"two")]
    bodies = [s3.get_object(Bucket="versions", Key="k", VersionId=name)["Body"].read() for name in names]
    assert bodies == [b"one", b"two"]
    s3.delete_object(Bucket="versions", Key="k")
    with pytest.raises(s3.exceptions.NoSuchKey):
        s3.get_object(Bucket="versions", Key="k")


def test_a_part_that_is_wrong_is_refused(s3: Any) -> None:
    upload = {"Bucket": "bulky", "Key": "wrong"}
    upload["UploadId"] = s3.create_multipart_upload(**upload)["UploadId"]
    parts = [{"PartNumber": n, "ETag": s3.upload_part(**upload, PartNumber=n, Body=b"tiny")["ETag"]} for n in (1, 2)]
    with pytest.raises(ClientError, match="EntityTooSmall"):
        s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
    wrong = [parts[0] | {"ETag": '"0"'}]
    with pytest.raises(ClientError, match="InvalidPart"):
        s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": wrong})
    with pytest.raises(ClientError, match=r"NoSuchKey|404"):
        s3.head_object(Bucket="bulky", Key="wrong")
