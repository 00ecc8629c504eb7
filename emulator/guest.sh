# The first process of a guest: its disk, devices, network and name; then it waits for the end of its owner.
#   guest.sh NAME ADDRESS PORT SWITCH CGROUP LOWER [ro:PATH | rw:PATH]…      (under unshare, see guests.py)
set -eu
name=$1 address=$2 port=$3 switch=/proc/$4/ns/net cgroup=$5 lower=$6
shift 6
read -r pid _ </proc/self/stat # /proc is still our owner's: the process id that it knows us by

ip -batch - <<END
link set lo up
link add eth0 type veth peer name $port netns $switch
addr add $address/16 dev eth0
link set eth0 up
END
nsenter --net="$switch" ip link set "$port" master br0 up

# The machine's root file system or an image below, what the guest writes in memory above: nothing is left of it.
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs /mnt
mkdir /mnt/root /mnt/upper /mnt/work
root=/mnt/root
mount -t overlay overlay -o "lowerdir=$lower",upperdir=/mnt/upper,workdir=/mnt/work $root
mount -t proc proc $root/proc
mount -t sysfs sysfs $root/sys
mount -t tmpfs -o mode=1777 tmpfs $root/tmp
mount -t tmpfs -o mode=755 tmpfs $root/run
mount -t tmpfs -o mode=755 tmpfs $root/dev
for device in null zero full random urandom tty; do
  : >$root/dev/$device
  mount --bind /dev/$device $root/dev/$device
done
ln -s /proc/self/fd $root/dev/fd
ln -s fd/0 $root/dev/stdin
ln -s fd/1 $root/dev/stdout
ln -s fd/2 $root/dev/stderr
mkdir $root/dev/shm $root/dev/pts $root/dev/mqueue
mount -t tmpfs -o mode=1777 tmpfs $root/dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts $root/dev/pts
ln -s pts/ptmx $root/dev/ptmx
mount -t mqueue mqueue $root/dev/mqueue || : # not in every kernel

# Version 1 of cgroups: a subtree of each controller is all that the guest sees.
if [ -n "$cgroup" ]; then
  mount -t tmpfs -o mode=755 tmpfs $root/sys/fs/cgroup
  for controller in freezer memory cpuacct; do
    mkdir $root/sys/fs/cgroup/$controller
    mount --bind "/sys/fs/cgroup/$controller/$cgroup" $root/sys/fs/cgroup/$controller
  done
elif [ -d /sys/fs/cgroup ]; then
  mount --rbind /sys/fs/cgroup $root/sys/fs/cgroup || true
fi

for told in "$@"; do
  path=${told#*:}
  mkdir -p "$root$path"
  mount --rbind "$path" "$root$path"
  case $told in ro:*) mount -o remount,ro,bind "$root$path" ;; esac
done

hostname "$name"
cd $root
mkdir -p .outside
pivot_root . .outside
cd /
umount -l /.outside
printf '%s\n' "$name" >/etc/hostname
# There is no DNS here: look-ups must fail at once, or every connection waits for one.
if [ -e /etc/nsswitch.conf ]; then sed -i 's/^hosts:.*/hosts: files/' /etc/nsswitch.conf; fi
rm -f /etc/resolv.conf
: >/etc/resolv.conf
echo "ready $pid"
# As process 1: bash reaps orphans; once standard input is closed it ends, and with it all that runs here.
exec bash -c 'trap "" HUP INT TERM; read -r _ || true'
