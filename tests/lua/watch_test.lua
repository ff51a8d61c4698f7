-- `tycho watch`: what its server answers, and what its page makes of it in a browser. The client is bash, which opens
-- connections by itself and sends what it is told to, a well-formed request or another.
local here = (arg and arg[0]:match ".*/") or "tests/lua/"
local check = dofile(here .. "check.lua")
local ty = require "tycho"
local http = ty.core.http_core
local encode, decode = ty.io.json_encode, ty.io.json_decode

local function has(program) return os.execute("command -v " .. program .. " >/dev/null 2>&1") == true end
local function quote(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

local outer = dofile(here .. "scratch.lua").folder
local root = outer .. "/runs"
ty.io.mkdir(root)

local interpreter
do
  local first = 0
  while arg[first - 1] do first = first - 1 end
  interpreter = arg[first]
end

local function write(path, text)
  ty.io.mkdir((root .. "/" .. path):match "^(.*)/")
  local file <close> = assert(io.open(root .. "/" .. path, "wb"))
  file:write(text)
end

local function append(path, text)
  local file <close> = assert(io.open(root .. "/" .. path, "ab"))
  file:write(text)
end

local pipe_of = {}
-- Starts `tycho watch`; its first line says where it is. Returns that line, and the port.
local function start(arguments)
  local pipe = assert(io.popen(("exec 2>&1; echo $$; exec %s watch %s"):format(quote(interpreter), arguments)))
  local id = pipe:read "l"
  local line = pipe:read "l" or ""
  pipe_of[#pipe_of + 1] = { pipe = pipe, id = id }
  return line, math.tointeger(tonumber(line:match ":(%d+)/")), #pipe_of
end

-- Ends it as Ctrl-C does; what it still printed and its exit status.
local function stop(number)
  local it = pipe_of[number]
  os.execute("kill -INT " .. it.id)
  local rest = it.pipe:read "a"
  local _, _, status = it.pipe:close()
  return rest, status
end

-- What a listening socket answers to bytes: the status, the head and the body.
local function talk(port, bytes)
  local sent, got = outer .. "/sent", outer .. "/got"
  local file <close> = assert(io.open(sent, "wb"))
  file:write(bytes)
  file:close()
  os.execute(("timeout 20 bash -c 'exec 3<>/dev/tcp/127.0.0.1/%d; cat %s >&3; cat <&3 >%s'"):format(port, sent, got))
  local reply <close> = assert(io.open(got, "rb"))
  local text = reply:read "a"
  local head, body = text:match "^(.-)\r\n\r\n(.*)$"
  return tonumber(text:match "^HTTP/1%.1 (%d+)"), head or text, body or ""
end

local function get(port, path, options)
  local o = options or {}
  local host = o.host or ("127.0.0.1:" .. port)
  return talk(port, ("%s %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n%s\r\n%s"):format(o.method or "GET", path,
    host, o.headers or "", o.body or ""))
end

local function get_json(port, path)
  local status, _, body = get(port, path)
  check.equal(status, 200, path)
  return decode(body)
end

-- The head of an answer about lines, and the lines.
local function lines_of(port, run, from, mark)
  local status, _, body = get(port, ("/api/lines?run=%s&from=%d&mark=%s"):format(run, from or 0, mark or ""))
  check.equal(status, 200, run)
  local head, rest = body:match "^([^\n]*)\n(.*)$"
  return decode(head), rest
end

-- Folders are looked through every few seconds.
local function eventually(holds)
  local done, tries = holds(), 0
  while not done and tries < 60 do
    ty.system.sleep(0.5)
    done, tries = holds(), tries + 1
  end
  check.ok(done, "after some seconds")
end

local function row(step, values)
  values.step, values.time = step, os.time() - 100 + step
  return encode(values) .. "\n"
end

do
  local fine, problem = pcall(http.listen, "127.0.0.1", 0)
  if not fine then
    check.test("without the library the error says what to install", function()
      check.ok(tostring(problem):find("libmicrohttpd", 1, true), problem)
    end)
    print("skipped: " .. tostring(problem))
    check.finish()
    return
  end
  problem:close()
end

check.test("reading below a folder and nowhere else", function()
  local real = http.real(root)
  write("a/b.txt", "0123456789")
  local outside <close> = assert(io.open(outer .. "/secret.txt", "w"))
  outside:write "secret"
  outside:close()
  os.execute(("ln -s %s/secret.txt %s/link.txt; ln -s %s %s/out; ln -s a/b.txt %s/inner.txt; mkfifo %s/pipe"):format(
    outer, root, outer, root, root, root))
  local bytes, size, changed = http.read(real, "a/b.txt", 2, 3)
  check.equal({ bytes, size }, { "234", 10 })
  check.ok(math.abs(changed - os.time()) < 1000)
  check.equal(http.read(real, "a/b.txt", 8, 100), "89")
  check.equal(http.read(real, "a/b.txt", 99, 100), "")
  check.equal(http.read(real, "inner.txt", 0, 100), "0123456789", "a link within")
  for _, path in ipairs { "../secret.txt", "link.txt", "out/secret.txt", "a/../../secret.txt", "nothing", "a", "pipe",
    "a/b.txt\0", "" } do
    check.equal(select("#", http.read(real, path, 0, 100)), 0, path)
  end
  check.fails(function() http.read(real, "a/b.txt", -1, 5) end, "expected a number of bytes")
  check.fails(function() http.listen("127.0.0.1", 70000) end, "a port from 0 to 65535")
  check.fails(function() http.listen("no-such-name.invalid", 0) end, "host: expected a name or address of this machine")
end)

check.test("the command line", function()
  local function run(arguments)
    local pipe = io.popen(("exec 2>&1; timeout 20 %s watch %s"):format(quote(interpreter), arguments))
    local text = pipe:read "a"
    local _, _, status = pipe:close()
    return { text, status }
  end
  check.ok(run("--help")[1]:find "^usage: tycho watch")
  check.equal(run("/no/such/folder"), { "watch: /no/such/folder: expected a folder, there is none of that name\n",
    2 })
  check.equal(run(root .. "/a/b.txt")[2], 2)
  check.equal(run("--port no"), { "--port: expected an integer in [0, 65535], got 'no'\n", 2 })
  check.equal(run("--port"), { "--port: expected a value, got none\n", 2 })
  check.equal(run("--frobnicate"), { "unknown argument '--frobnicate'; there are DIR, --port and --host\n", 2 })
  check.equal(run(("%s %s"):format(root, root))[2], 2)
end)

if not has "bash" then
  print "skipped: what the server answers (there is no bash to ask it)"
  check.finish()
  return
end

local empty = outer .. "/empty"
ty.io.mkdir(empty)
check.test("a folder without runs, which gets one; a port that is in use; Ctrl-C", function()
  local line, port, number = start(empty .. " --port 0")
  check.ok(line:find("watching " .. empty .. " at http://127.0.0.1:", 1, true), line)
  check.equal(#get_json(port, "/api/runs").runs, 0)
  local second = start(("%s --port %d"):format(empty, port))
  check.equal(second, ("watch: port %d of 127.0.0.1 is in use; --port takes another, --port 0 any that is free")
    :format(port))
  check.equal({ select(2, pipe_of[#pipe_of].pipe:close()) }, { "exit", 1 })
  ty.io.mkdir(empty .. "/later")
  ty.io.write_atomic(empty .. "/later/metrics.jsonl", '{"step":1,"loss":2}\n')
  eventually(function() return #get_json(port, "/api/runs").runs == 1 end)
  local rest, status = stop(number)
  check.equal({ rest, status }, { "\n", 0 })
end)

-- ---- the runs that the rest looks at ----

local text = {}
for step = 1, 300 do text[step] = row(step, { loss = 2 * math.exp(-step / 80) + 0.1, norm = 1 + (step % 7) / 10 }) end
write("first/metrics.jsonl", table.concat(text))
write("first/run.json", encode { steps = 400, start = 0, began = os.time() - 100, title = "one",
  options = { lr = 0.5 } })
ty.io.mkdir(root .. "/first/sheets")
for i = 1, 3 do
  ty.io.save_image(("%s/first/sheets/sample-%d.png"):format(root, 10 * i),
    ty.full({ 3, 16, 16 }, 60 * i, { dtype = "u8" }))
end
for step = 1, 300 do text[step] = row(step, { loss = 2.5 * math.exp(-step / 90) + 0.2 }) end
write("recipe/seed0/metrics.jsonl", table.concat(text))
write("recipe/seed0/run.json", encode { steps = 300 })
write("recipe/recipe.json", encode { recipe = "zoo/thing", args = { width = 48 } })
ty.io.save_image(root .. "/recipe/thing.png", ty.zeros(3, 8, 8, { dtype = "u8" }))
local hostile = "x<img src=q onerror=alert(1)>&amp;"
write(hostile .. "/metrics.jsonl", table.concat { "{broken\n", "[1,2]\n", "null\n", "\n", '{"step":1,"loss":1e999}\n',
  '{"step":"one","loss":{}}\n', '{"step":2,"loss":"nan"}\n', "\255\254\0\n", ("["):rep(20000), "\n",
  '{"step":3,"loss":0.5,"<b>bold</b>":1,"time":1e300}\n', '{"step":4,"loss":0.25' })
write(hostile .. "/run.json", '{"steps":1e999,"title":"<script>document.title=\'taken\'</script>"}')
write("stale/metrics.jsonl", '{"step":1,"loss":1}\n')
os.execute(("touch -d '-3 hours' %s/stale/metrics.jsonl"):format(root))
write("paused/metrics.jsonl", '{"step":5,"loss":1}\n')
write("paused/run.json", encode { steps = 10, stop = 5 })
write("first/page.png", "<html><script>alert(1)</script></html>")
os.execute(("ln -s %s %s/first/loop; ln -s /etc %s/first/etc; ln -s %s/secret.txt %s/first/secret.png"):format(root,
  root, root, outer, root))

local _, port, number = start(root .. " --port 0")

check.test("the list of runs", function()
  local by_name = {}
  for _, run in ipairs(get_json(port, "/api/runs").runs) do by_name[run.name] = run end
  local first = by_name.first
  check.equal({ first.step, first.steps, first.state }, { 300, 400, "running" })
  check.close(first.rate, 1, 0.02)
  check.close(first.left, 100, 0.02)
  check.equal(first.size, ty.io.stat(root .. "/first/metrics.jsonl").size)
  check.equal(by_name["recipe/seed0"].state, "finished")
  check.equal(by_name.stale.state, "stalled")
  check.equal(by_name.paused.state, "paused")
  check.equal({ by_name[hostile].step, by_name[hostile].steps }, { 3, nil })
  local count = 0
  for _ in pairs(by_name) do count = count + 1 end
  check.equal(count, 5, "each run once, whatever links lead to")
end)

check.test("what a run is", function()
  local about = get_json(port, "/api/about?run=first")
  check.equal(decode(about.run).options.lr, 0.5)
  local paths = {}
  for i, picture in ipairs(about.pictures) do paths[i] = picture.path end
  check.equal(paths, { "first/page.png", "first/sheets/sample-10.png", "first/sheets/sample-20.png",
    "first/sheets/sample-30.png" }, "what links lead to is left out")
  about = get_json(port, "/api/about?run=recipe%2Fseed0")
  check.equal(decode(about.recipe).args.width, 48)
  check.equal(about.pictures[1].path, "recipe/thing.png", "a recipe's picture stands above its runs")
  check.equal(get(port, "/api/about?run=nobody"), 404)
  check.equal(get(port, "/api/about"), 404)
  write("recipe/metrics.json", encode { args = { width = 48 }, table = {} })
  os.execute(("touch -d '+1 hour' %s/recipe/metrics.json"):format(root))
  eventually(function()
    local results = get_json(port, "/api/about?run=recipe%2Fseed0").results
    return results and decode(results).args.width == 48
  end)
end)

check.test("new lines only, while the file grows", function()
  local path, whole = "first/metrics.jsonl", ty.io.read(root .. "/first/metrics.jsonl")
  local head, got = lines_of(port, "first")
  check.equal({ got == whole, head.next, head.more, head.reset }, { true, #whole, false, false })
  local again, none = lines_of(port, "first", head.next, head.mark)
  check.equal({ none, again.next, again.reset }, { "", #whole, false })
  append(path, '{"step":301,')
  again, none = lines_of(port, "first", head.next, head.mark)
  check.equal({ none, again.next }, { "", #whole }, "a line that is being written")
  append(path, '"loss":0.5}\n')
  again, none = lines_of(port, "first", head.next, head.mark)
  check.equal({ none, again.next, again.reset }, { '{"step":301,"loss":0.5}\n', #whole + 24, false })
  -- The file of another run in its place, longer than this one was.
  local other = {}
  for step = 1, 900 do other[step] = row(step, { loss = 7.5 }) end
  other = table.concat(other)
  write(path, other)
  check.ok(#other > again.next)
  local anew, all = lines_of(port, "first", again.next, again.mark)
  check.equal({ anew.reset, all == other, anew.next }, { true, true, #other })
  write(path, '{"step":1,"loss":3}\n')
  anew, all = lines_of(port, "first", anew.next, anew.mark)
  check.equal({ anew.reset, all }, { true, '{"step":1,"loss":3}\n' }, "a shorter one")
  write(path, whole)
  check.equal(select(3, get(port, "/api/lines?run=stale")):match "\n(.*)$", '{"step":1,"loss":1}\n')
end)

check.test("a large file comes in pieces of whole lines", function()
  local line, list = '{"step":%d,"loss":0.123456789012345,"norm":1.5,"rate":0.001}\n', {}
  for step = 1, 90000 do list[step] = line:format(step) end
  local whole = table.concat(list)
  write("large/metrics.jsonl", whole .. ("x"):rep(5 << 20) .. "\n" .. line:format(90001))
  local parts, from, mark, rounds = {}, 0, "", 0
  repeat
    local head, got = lines_of(port, "large", from, mark)
    check.ok(#got <= 1 << 21 and head.next >= from)
    parts[#parts + 1], from, mark, rounds = got, head.next, head.mark, rounds + 1
  until not head.more or rounds > 20
  local all = table.concat(parts)
  check.ok(rounds >= 5 and rounds < 10, rounds)
  check.equal(all:sub(1, #whole) == whole, true)
  check.equal(all:sub(-#line:format(90001)), line:format(90001), "past a line that is no line")
  local reads = ty.system.clock()
  for _ = 1, 3 do lines_of(port, "large", from, mark) end
  check.ok(ty.system.clock() - reads < 5, "asking again reads nothing")
  os.execute("rm -r " .. root .. "/large")
end)

check.test("pictures", function()
  local status, head, body = get(port, "/file?path=first%2Fsheets%2Fsample-20.png")
  check.equal(status, 200)
  check.ok(head:find "Content%-Type: image/png" and head:find "nosniff" and head:find "Content%-Security%-Policy", head)
  check.equal(ty.io.decode_image(body):select(0, 0):max():item(), 120)
  local size = #body
  status, head, body = get(port, "/file?path=first%2Fsheets%2Fsample-20.png", { method = "HEAD" })
  check.equal({ status, body, tonumber(head:match "Content%-Length: (%d+)") }, { 200, "", size })
end)

check.test("nothing else of this machine", function()
  for _, path in ipairs { "../secret.txt", "../secret.png", "first/secret.png", "first/page.png", "first/run.json",
    "/etc/passwd", "%2e%2e%2fsecret.txt", "first/..%2f..%2fsecret.txt", "first/etc/passwd",
    "first/loop/../../secret.txt", "first\\..\\secret.png", "first/sheets", "", ("a/"):rep(3000) .. "b.png" } do
    local status, _, body = get(port, "/file?path=" .. path)
    check.ok(status == 404 or status == 414 or status == 431, path .. " " .. tostring(status))
    check.ok(not body:find("secret\n", 1, true) and not body:find("root:", 1, true), path)
  end
  for _, path in ipairs { "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/page.lua", "/site.lua", "//etc/passwd",
    "/first/metrics.jsonl", "/api", "/api/lines", "/api/lines?run=..", "/api/lines?run=..%2F..", "/api/lines?run=/etc",
    "/api/lines?run=first/etc" } do
    check.equal(get(port, path), 404, path)
  end
  check.equal(get(port, "/api/lines?run=first&from=-1"), 400)
  check.equal(get(port, "/api/lines?run=first&from=x"), 400)
  check.equal(select(2, lines_of(port, "first", 1 << 60)) ~= "", true, "past the end: from the start")
end)

check.test("other methods, other hosts, and no requests at all", function()
  for _, method in ipairs { "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "BREW" } do
    local status, head = get(port, "/api/runs", { method = method, headers = "Content-Length: 4\r\n", body = "body" })
    check.equal(status, 405, method)
    check.ok(head:find "Allow: GET, HEAD", head)
  end
  for _, host in ipairs { "evil.example", "localhost.evil.example", "evil.example:" .. port, "127.0.0.1.evil.example",
    "", "10.0.0.1", "localhost:80:80", "[::1].evil", "127.0.0.1@evil.example" } do
    check.equal(get(port, "/api/runs", { host = host }), 403, host)
  end
  for _, host in ipairs { "localhost", "LocalHost:" .. port, "127.0.0.1", "[::1]:" .. port } do
    check.equal(get(port, "/api/runs", { host = host }), 200, host)
  end
  check.equal(talk(port, "GET /api/runs HTTP/1.1\r\nConnection: close\r\n\r\n") ~= 200, true, "no host")
  check.equal(talk(port, "GET /api/runs HTTP/1.0\r\n\r\n") ~= 200, true, "no host, as it was once allowed")
  check.ok(talk(port, "\0\1\2\3 nonsense\r\n\r\n") ~= 200)
  check.ok(talk(port, "GET " .. ("/"):rep(100000) .. " HTTP/1.1\r\nHost: localhost\r\n\r\n") ~= 200)
  check.ok(talk(port, "GET / HTTP/1.1\r\nHost: localhost\r\n" .. ("X: " .. ("y"):rep(1000) .. "\r\n"):rep(200)
    .. "\r\n") ~= 200)
  check.equal(get(port, "/"), 200, "and it still answers")
end)

check.test("the files of the page", function()
  for path, kind in pairs { ["/"] = "text/html", ["/page.css"] = "text/css", ["/page.js"] = "text/javascript" } do
    local status, head, body = get(port, path)
    check.equal(status, 200)
    check.ok(head:find("Content-Type: " .. kind, 1, true), head)
    check.ok(#body > 500)
    check.ok(not body:find "https?://", "nothing of another host")
  end
end)

-- ---- in a browser ----

local chromium = has "chromium" and "chromium" or has "chromium-browser" and "chromium-browser"
if not chromium then
  print "skipped: the page in a browser (there is no chromium)"
else
  check.test("the page draws the curves, and shows names as text", function()
    local address = ("http://127.0.0.1:%d/#theme=light&run=first&run=recipe%%2Fseed0&run=%s"):format(port,
      (hostile:gsub("[^%w]", function(c) return ("%%%02X"):format(c:byte()) end)))
    local picture, page = outer .. "/page.png", outer .. "/page.html"
    -- Under load it may not come to its end in time: once more then.
    local function browse(what, file)
      for _ = 1, 3 do
        os.execute(("timeout 60 %s --headless --no-sandbox --disable-gpu --hide-scrollbars --no-first-run "
          .. "--window-size=1200,900 --virtual-time-budget=4000 --user-data-dir=%s/profile %s '%s' >%s 2>/dev/null")
          :format(chromium, outer, what, address, file))
        if ty.io.exists(page) and ty.io.read(page):find "data%-ready" and (file == page or ty.io.exists(picture)) then
          return
        end
      end
    end
    browse("--dump-dom", page)
    browse("--screenshot=" .. picture, "/dev/null")
    local dom = ty.io.read(page)
    check.equal(dom:match 'data%-ready="([^"]*)"', "300 300 4", "lines that were read of each run")
    check.ok(not dom:find "<img src=q" and not dom:find "<b>bold" and not dom:find "<title>taken", "text stays text")
    check.ok(dom:find("x&lt;img src=q onerror=alert(1)&gt;&amp;amp;", 1, true), "the name is shown")
    check.ok(dom:find "300 / 400" and dom:find "left" and dom:find "finished", "how far they are")
    check.ok(dom:find 'sample%-30%.png' and dom:find "3 of 3", "the newest picture")
    check.ok(dom:find "zoo/thing", "arguments")
    -- The first two colours of curves, in the field of the first chart.
    local image = ty.io.load_image(picture, { channels = 3 })
    check.equal(image.shape, { 3, 900, 1200 })
    local field = image["0:3, 60:330, 320:760"]:to "i32"
    for name, colour in pairs { first = { 0x2f, 0x6f, 0xde }, ["recipe/seed0"] = { 0xe0, 0x63, 0x1b } } do
      local near = (field - ty.tensor(colour, { dtype = "i32" }):reshape(3, 1, 1)):abs():sum(0):le(40)
      local columns = near:any(0):sum():item()
      check.ok(columns > 150, ("the curve of %s: %d columns have its colour"):format(name, columns))
    end
  end)
end

check.test("the end", function()
  local rest, status = stop(number)
  check.equal({ rest, status }, { "\n", 0 }, "nothing went wrong on the way")
end)

os.execute("rm -rf " .. quote(outer))
check.finish()
