# Runs in a container while it is built: Ansible, at its locked version, on the very container it runs in.
set -eu
export DEBIAN_FRONTEND=noninteractive USER=root
if [ -s /run/certificates ]; then
  export PIP_CERT=/run/certificates SSL_CERT_FILE=/run/certificates GIT_SSL_CAINFO=/run/certificates
fi
place=/opt/ansible # the role `clean` leaves alone what is named so
if ! python3 -c "import ensurepip" 2>/dev/null; then
  apt-get -qq update
  apt-get -qq install --no-install-recommends -y ca-certificates python3-apt python3-venv >/dev/null
fi
python3 -m venv $place
$place/bin/pip install --quiet --no-cache-dir --disable-pip-version-check --require-hashes -r /run/castra/ansible.txt
# pipelining as for machines; the modules run in the system's own Python, which knows apt
cd /run/castra/ansible
ANSIBLE_CONFIG=/run/castra/ansible/ansible.cfg ANSIBLE_HOME=$place/home \
  $place/bin/ansible-playbook -i localhost, -c local -e ansible_become=false -e @/run/castra/playbook.json \
  -e ansible_python_interpreter=/usr/bin/python3 playbooks/node.yml
rm -rf $place /tmp/.ansible-*
