# One template for every flavour and for two Packers. The fenced parts are for Packer >= 1.11 with its plugins
# (`packer init` fetches them); `ami.stage` leaves them out for Debian's 1.6.6, which refuses them.
# >>> packer >= 1.7
packer {
  required_version = ">= 1.11.0"
  required_plugins {
    amazon = {
      source  = "github.com/hashicorp/amazon"
      version = "~> 1.8"
    }
    ansible = {
      source  = "github.com/hashicorp/ansible"
      version = "~> 1.1"
    }
  }
}
# <<< packer

variable "flavour" {
  type = string
}
variable "image_name" {
  type = string
}
variable "tags" {
  type        = map(string)
  description = "Of the image, its snapshots and all that is made on the way."
}
variable "region" {
  type = string
}
variable "base_image" {
  type        = string
  description = "Resolved before the content hash is taken; never a filter here."
}
variable "root_device" {
  type = string
}
variable "root_gib" {
  type = number
}
variable "kms_key" {
  type        = string
  default     = ""
  description = "Encrypts the root volume; empty is the account's own key for EBS."
}
variable "instance_type" {
  type = string
}
variable "instance_profile" {
  type    = string
  default = ""
}
variable "subnet" {
  type    = string
  default = ""
}
variable "security_group" {
  type = string
}
variable "key_pair" {
  type        = string
  description = "The name of the temporary key pair, so that it is found if Packer is killed."
}
variable "user" {
  type = string
}
variable "ssh_port" {
  type    = number
  default = 22
}
variable "ssh_interface" {
  type    = string
  default = ""
}
variable "deadline_minutes" {
  type        = number
  description = "The instance shuts itself down after this long, and is terminated thereby."
}
variable "endpoint" {
  type        = string
  default     = ""
  description = "Of an emulator of EC2; empty is AWS."
}
variable "poll_seconds" {
  type    = number
  default = 15
}
variable "playbook" {
  type = string
}
variable "playbook_command" {
  type        = string
  description = "Runs ansible-playbook through ansible-runner, see ami/playbook.py."
}
variable "playbook_variables" {
  type        = string
  description = "A JSON file."
}
variable "manifest" {
  type = string
}

source "amazon-ebs" "node" {
  ami_name        = var.image_name
  ami_description = "castra ${var.flavour}, on ${var.base_image}"
  region          = var.region
  source_ami      = var.base_image
  instance_type   = var.instance_type
  subnet_id       = var.subnet
  ena_support     = true
  ebs_optimized   = true

  iam_instance_profile    = var.instance_profile
  security_group_id       = var.security_group
  temporary_key_pair_name = var.key_pair
  shutdown_behavior       = "terminate"
  user_data               = "#!/bin/sh\nshutdown -h +${var.deadline_minutes}\n"

  custom_endpoint_ec2        = var.endpoint
  skip_metadata_api_check    = var.endpoint != ""
  skip_credential_validation = var.endpoint != ""
  skip_region_validation     = var.endpoint != ""

  communicator              = "ssh"
  ssh_username              = var.user
  ssh_port                  = var.ssh_port
  ssh_interface             = var.ssh_interface
  ssh_timeout               = "10m"
  ssh_clear_authorized_keys = true

  aws_polling {
    delay_seconds = var.poll_seconds
    max_attempts  = 480
  }
  launch_block_device_mappings {
    device_name           = var.root_device
    volume_size           = var.root_gib
    volume_type           = "gp3"
    iops                  = 3000
    throughput            = 250
    encrypted             = true
    kms_key_id            = var.kms_key
    delete_on_termination = true
  }
  # >>> packer >= 1.7
  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 2
  }
  imds_support = "v2.0"
  # <<< packer

  tags            = var.tags
  snapshot_tags   = var.tags
  run_tags        = var.tags
  run_volume_tags = var.tags
}

build {
  sources = ["source.amazon-ebs.node"]

  provisioner "shell" {
    inline = ["if command -v cloud-init >/dev/null; then sudo cloud-init status --wait || true; fi"]
  }
  provisioner "ansible" {
    command         = var.playbook_command
    playbook_file   = var.playbook
    user            = var.user
    use_proxy       = false # its proxy offers ssh-rsa alone, which OpenSSH >= 8.8 refuses
    extra_arguments = ["-e", "@${var.playbook_variables}"]
  }
  post-processor "manifest" {
    output     = var.manifest
    strip_path = true
  }
}
