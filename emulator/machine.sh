# The first process of a machine: it lays its disk, waits for its network, then runs systemd in it, again at each reboot.
#   machine.sh LOWER FOLDER NAME      (under unshare, see machines.py)
set -eu
lower=$1 folder=$2 name=$3 root=$2/root

ip link set lo up
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs /run # systemd-nspawn keeps notes there, and must not find those of others
mount -t overlay overlay -o "lowerdir=$lower,upperdir=$folder/upper,workdir=$folder/work" "$root"
echo ready
read -r _ # the network is there

# What EC2 and cloud-init would bring lies in /run, so that none of it gets onto the disk, and so into an image.
boot() {
  systemd-nspawn --quiet --directory="$root" --boot --register=no --keep-unit --link-journal=no --console=pipe \
    --machine="$name" --hostname="$name" --resolv-conf=off --timezone=off --capability=all --drop-capability=CAP_SYS_TIME,CAP_SYS_MODULE \
    --bind-ro="$folder/units:/run/systemd/system" --bind-ro="$folder/login:/run/login" \
    --bind-ro="$folder/hosts:/etc/hosts" --bind-ro="$folder/resolv.conf:/etc/resolv.conf" \
    systemd.log_target=null </dev/null &
  nspawn=$!
}
nspawn=0 code=133
trap 'kill -TERM $nspawn 2>/dev/null || true' TERM
while [ $code = 133 ]; do # how systemd-nspawn says that it was rebooted
  boot
  code=0
  wait $nspawn || code=$?
  while kill -0 $nspawn 2>/dev/null; do # the wait was cut short by a signal
    code=0
    wait $nspawn || code=$?
  done
done
