"""Questions of analysts about the traces: all of them are answered."""

QUESTIONS = (
    "SELECT type, count() AS n FROM events GROUP BY type ORDER BY n DESC LIMIT 5",
    "SELECT avg(score) FILTER (WHERE verdict = 'scored') FROM rewards",
    "WITH best AS (SELECT trajectory_id, max(score) AS s FROM rewards GROUP BY trajectory_id) SELECT countIf(s = 1) FROM best",
    "SELECT session_id, quantile(0.5)(milliseconds) FROM turns GROUP BY session_id",
    "SELECT toStartOfInterval(time, INTERVAL 1 MINUTE) AS t, sum(tokens) FROM turns GROUP BY t ORDER BY t",
    "SELECT * FROM turns WHERE trajectory_id IN (SELECT trajectory_id FROM rewards WHERE score = 1) LIMIT 3",
    "SELECT metrics['reward_mean'] FROM steps WHERE kind = 'grpo'",
    "SELECT m FROM (SELECT JSONExtractArrayRaw(body, 'members') AS a FROM payloads) ARRAY JOIN a AS m",
    "SELECT row_number() OVER (PARTITION BY run_id ORDER BY timestamp) FROM events",
    "SELECT dateDiff('second', min(time), max(time)) FROM events",
    "SELECT t.text FROM turns AS t JOIN rewards AS r ON t.trajectory_id = r.trajectory_id LIMIT 1 BY t.run_id",
    "SELECT 1 UNION ALL SELECT 2 -- a remark",
    "SELECT text FROM turns WHERE text LIKE '%file(%'",
    "SELECT avgIf(score, verdict = 'scored'), uniqIf(trajectory_id, score > 0), quantileIf(0.9)(score, score > 0) FROM rewards",
    "SELECT run_id, avgMerge(s) FROM (SELECT run_id, avgState(score) AS s FROM rewards GROUP BY run_id, "
    "scorer) GROUP BY run_id",
    "SELECT quantileTDigest(0.9)(milliseconds), quantilesTDigest(0.1, 0.9)(milliseconds) FROM turns",
    "SELECT arrayJoin(histogram(5)(score)) FROM rewards",
    "SELECT groupConcat(', ')(DISTINCT scorer) FROM rewards",
    "SELECT studentTTest(score, (toUInt64(offset) % 2)::UInt8) FROM rewards",
    "SELECT mannWhitneyUTest(score, (toUInt64(offset) % 2)::UInt8) FROM rewards",
    "SELECT sequenceMatch('(?1).*(?2)')(toDateTime(time), type = 'RolloutStarted', type = 'RolloutEnded') "
    "FROM events GROUP BY trajectory_id",
    "SELECT windowFunnel(3600)(toDateTime(time), type = 'RolloutStarted', type = 'TurnGenerated') FROM events GROUP BY run_id",
    "SELECT toStartOfWeek(time), toYYYYMMDD(time), toDayOfWeek(time), toISOWeek(time) FROM events LIMIT 1",
    "SELECT age('hour', min(time), max(time)) FROM events",
    "SELECT arrayProduct([1, 2]), arrayReduce('sum', [1, 2]), arrayMax(x -> -x, [1, 2])",
    "SELECT arrayFold((a, x) -> a + x, [1, 2], 0::Int64)",
    "SELECT regexpExtract(text, '([a-z]+)', 1) FROM turns LIMIT 1",
    "SELECT JSON_VALUE(body, '$.text'), JSON_EXISTS(body, '$.text'), JSON_QUERY(body, '$') FROM payloads LIMIT 3",
    "SELECT multiSearchAny(text, ['error', 'busy']), multiSearchFirstIndex(text, ['a', 'b']) FROM turns LIMIT 3",
    "SELECT COLUMNS('_id$') FROM events LIMIT 1",
    "SELECT run_id, type, count() FROM events GROUP BY GROUPING SETS ((run_id), (type), ())",
    "SELECT run_id, type, count() FROM events GROUP BY run_id, type WITH ROLLUP",
    "SELECT run_id, type, count() FROM events GROUP BY run_id, type WITH CUBE",
    "SELECT run_id, count() FROM events GROUP BY run_id WITH TOTALS",
    "SELECT transform(type, ['TurnGenerated'], ['turn'], 'other') AS kind, count() FROM events GROUP BY kind",
    "SELECT untuple((1, 2)), tuple(1, 'a').2",
    "DESCRIBE turns",
    "DESC TABLE rewards",
    "SHOW TABLES",
    "SHOW TABLES LIKE 't%'",
    "SHOW COLUMNS FROM turns",
    "SHOW CREATE TABLE turns",
    "EXPLAIN SELECT count() FROM turns",
    "EXPLAIN PLAN indexes = 1 SELECT * FROM events WHERE run_id = 'run-1'",
    "EXPLAIN PIPELINE SELECT count() FROM turns",
    "EXPLAIN SYNTAX SELECT * FROM turns",
    "EXPLAIN ESTIMATE SELECT count() FROM events WHERE run_id = 'run-1'",
    "SELECT leftPad('7', 3, '0'), rightPad('7', 3), rand() >= 0, randCanonical() < 1, generateUUIDv4() != generateUUIDv7()",
    "SELECT * EXCEPT (body, headers) FROM events LIMIT 2",
    "SELECT * REPLACE (upper(type) AS type) FROM events LIMIT 2",
    "SELECT * APPLY(toString) FROM rewards LIMIT 1",
    "SELECT max(score) - min(score) AS spread, run_id FROM rewards GROUP BY ALL HAVING spread >= 0 ORDER BY ALL",
    "SELECT number, toDate('2026-01-01') + number FROM numbers(7)",
    "SELECT t.run_id, s.loss FROM turns AS t ASOF JOIN (SELECT run_id, timestamp, metrics['loss'] AS loss FROM steps) AS s "
    "ON t.run_id = s.run_id AND t.timestamp >= s.timestamp LIMIT 5",
    "SELECT t.run_id FROM turns AS t LEFT ANTI JOIN rewards AS r USING (trajectory_id) LIMIT 5",
    "SELECT exponentialMovingAverage(5)(reward, i) FROM (SELECT metrics['reward_mean'] AS reward, "
    "rowNumberInAllBlocks() AS i FROM steps)",
    "SELECT simpleLinearRegression(new_version, metrics['reward_mean']) FROM steps",
    "SELECT corr(tokens, milliseconds), covarSamp(tokens, milliseconds), kurtSamp(tokens) FROM turns",
    "SELECT topKWeighted(3)(sender, tokens), approx_top_sum(3)(sender, tokens) FROM events",
    "SELECT avg(passed) OVER (ORDER BY time ROWS BETWEEN 10 PRECEDING AND CURRENT ROW) FROM outcomes",
    "SELECT lagInFrame(score) OVER w, nth_value(score, 2) OVER w FROM rewards WINDOW w AS (PARTITION BY run_id ORDER BY time)",
    "SELECT formatDateTime(time, '%Y-%m-%d %H:00') AS hour, count() FROM events GROUP BY hour ORDER BY hour",
    "SELECT toStartOfHour(time) AS h, count() FROM events GROUP BY h ORDER BY h WITH FILL STEP toIntervalHour(1) LIMIT 9",
    "SELECT bar(count(), 0, 100, 20), type FROM events GROUP BY type",
    "SELECT splitByWhitespace(text), tokens(text), ngrams(text, 3) FROM turns LIMIT 1",
    "SELECT editDistance('kitten', 'sitting'), levenshteinDistance('a', 'b'), jaroSimilarity('abc', 'abd'), "
    "ngramDistance(text, 'x') "
    "FROM turns LIMIT 1",
    "SELECT cosineDistance([1., 2.], [2., 1.]), L2Distance([1., 2.], [2., 1.]), dotProduct([1, 2], [3, 4])",
    "SELECT arrayZip([1], ['a']), arrayEnumerateUniq([1, 1]), arrayShingles([1, 2, 3], 2), arrayPartialSort(2, [3, 1, 2])",
    "SELECT mapFilter((k, v) -> v > 0, load), mapKeys(load), mapSort(load), mapUpdate(load, map('a', 1.)) FROM workers LIMIT 1",
    "SELECT if(score > 0.5, 'good', 'bad') AS grade, count() FROM rewards GROUP BY grade",
    "SELECT CASE WHEN score > 0.5 THEN 1 ELSE 0 END, CAST(score AS Nullable(Decimal(9, 3))), score::String "
    "FROM rewards LIMIT 1",
    "SELECT toInt64OrNull('x'), parseDateTimeBestEffortOrNull('yesterday'), accurateCastOrNull('1', 'UInt8')",
    "SELECT count() FROM (SELECT DISTINCT ON (run_id) run_id, id FROM events ORDER BY run_id, timestamp)",
    "SELECT run_id FROM runs INTERSECT SELECT run_id FROM steps",
    "SELECT run_id FROM runs EXCEPT SELECT run_id FROM rejects",
    "FROM turns SELECT count()",
    "SELECT id FROM events ORDER BY timestamp DESC LIMIT 2 OFFSET 1",
    "SELECT id FROM events WHERE timestamp BETWEEN 0 AND 9e18 AND type NOT IN ('TurnGenerated') AND id ILIKE '%a%' LIMIT 1",
    "SELECT (SELECT max(score) FROM rewards) AS best, (SELECT min(time) FROM events) AS first",
    "SELECT quantileExactWeighted(0.5)(score, 1), medianExact(score), argMax(scorer, score), anyHeavy(scorer) FROM rewards",
    "SELECT sumMap(map(type, 1)), groupBitOr(1), groupArraySorted(3)(offset), groupUniqArray(2)(type), "
    "sparkbar(5)(toUInt64(offset), 1) FROM events",
    "SELECT cityHash64(run_id), sipHash64(id), hex(SHA256(id)), xxHash64(id) FROM events LIMIT 1",
    "SELECT extractAll(text, '[a-z]+'), replaceRegexpAll(text, '[0-9]', '#'), countSubstrings(text, 'a') FROM turns LIMIT 1",
    "SELECT topk FROM (SELECT topK(2)(type) AS topk FROM events) -- file('/etc/passwd')",
    "SELECT 'It''s \\'quoted\\' \\\\ and “curly” – ok' AS `a name`, \"a name\" FROM (SELECT 1)",
    "SELECT * FROM view(SELECT 1 AS one)",
    "SELECT c1 FROM values('c1 UInt8', 1, 2)",
    "SELECT format('{} of {}', toString(1), '2'), concat_ws('-', 'a', 'b'), substringIndex('a.b.c', '.', 2), initcap('abc')",
    "WITH RECURSIVE r AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM r WHERE n < 5) SELECT sum(n) FROM r",
    "WITH 0.5 AS bound SELECT count() FROM rewards WHERE score >= bound",
    "WITH (x -> x * 2) AS twice SELECT arrayMap(twice, [1, 2])",
    "SELECT run_id, count() FROM events PREWHERE type = 'TurnGenerated' WHERE tokens > 0 GROUP BY 1 ORDER BY "
    "2 DESC LIMIT 3 WITH TIES;",
    "SELECT scorer, countIf(verdict = 'excluded') / count() AS excluded FROM rewards GROUP BY scorer",
    "SELECT sumIf(tokens, finish_reason = 'length'), minIf(milliseconds, tokens > 0), anyIf(text, tokens > 0) FROM turns",
    "SELECT uniqExactState(trajectory_id) AS s FROM rewards GROUP BY run_id HAVING finalizeAggregation(s) > 0",
    "SELECT run_id, countMerge(n) FROM (SELECT run_id, countState() AS n FROM turns GROUP BY run_id, agent) GROUP BY run_id",
    "SELECT sumOrNull(cost), avgOrDefault(cost), argMinIf(answer, cost, cost > 0) FROM trajectories",
    "SELECT sumForEach(member_rewards), sumArray(member_rewards), avgArrayIf(member_rewards, members > 0) FROM groups",
    "SELECT quantileBFloat16(0.5)(milliseconds), quantileTiming(0.9)(milliseconds), quantileDD(0.01, "
    "0.9)(milliseconds) FROM turns",
    "SELECT welchTTest(score, (toUInt64(offset) % 2)::UInt8), kolmogorovSmirnovTest(score, (toUInt64(offset) % 2)::UInt8) "
    "FROM rewards",
    "SELECT meanZTest(1., 1., 0.95)(score, (toUInt64(offset) % 2)::UInt8), cramersV(scorer, verdict) FROM rewards",
    "SELECT sequenceCount('(?1)(?t<=60)(?2)')(toDateTime(time), type = 'ToolCalled', type = 'ToolObserved') FROM events "
    "GROUP BY attempt_id LIMIT 3",
    "SELECT retention(type = 'RolloutStarted', type = 'RolloutEnded') FROM events GROUP BY run_id",
    "SELECT uniqUpTo(3)(scorer), uniqHLL12(id), uniqCombined64(id) FROM rewards",
    "SELECT groupArrayMovingAvg(3)(score), groupArrayMovingSum(2)(score), groupArrayLast(2)(score) FROM rewards",
    "SELECT groupArrayInsertAt('', 3)(scorer, 0), groupArraySample(2)(scorer), groupArrayIntersect([1, 2]) FROM rewards",
    "SELECT intervalLengthSum(timestamp, timestamp + 1000), maxIntersections(timestamp, timestamp + 5), "
    "deltaSumTimestamp(offset, "
    "timestamp) FROM turns",
    "SELECT entropy(scorer), skewPop(score), varSamp(score), stddevPopStable(score), rankCorr(score, score) FROM rewards",
    "SELECT toStartOfFiveMinutes(time), toMonday(time), toStartOfQuarter(time), timeSlot(time), dateName('month', time) "
    "FROM events LIMIT 1",
    "SELECT date_trunc('hour', time), date_diff('minute', min(time) OVER (), time), addHours(time, 1), subtractDays(time, 2) "
    "FROM events LIMIT 1",
    "SELECT toUnixTimestamp64Milli(time), toTimeZone(time, 'Europe/Berlin'), dateTime64ToSnowflakeID(time) FROM events LIMIT 1",
    "SELECT arrayCumSum([1, 2]), arrayDifference([1, 3]), arraySlice([1, 2, 3], 2), arrayFlatten([[1], "
    "[2]]), arrayDotProduct([1], "
    "[2])",
    "SELECT arrayExists(x -> x > 1, member_rewards), arrayFirst(x -> x > 0, member_rewards), arraySort(x "
    "-> -x, member_rewards), "
    "arrayCount(x -> x = 1, member_rewards), arrayFilter((r, a) -> a > 0, member_rewards, "
    "member_advantages) FROM groups LIMIT 3",
    "SELECT arrayReduceInRanges('max', [(1, 2)], [1, 5, 2]), arrayRotateLeft([1, 2, 3], 1), arrayJaccardIndex([1, 2], [2, 3])",
    "SELECT member_trajectories[1], member_rewards[-1], tupleElement((1, 'a'), 2), "
    "arrayElementOrNull([1], 5) FROM groups LIMIT 1",
    "SELECT JSONExtractString(body, 'finish_reason'), JSONExtractKeys(body), JSONHas(body, 'text'), isValidJSON(body), "
    "simpleJSONExtractString(body, 'text'), JSONLength(body) FROM payloads LIMIT 2",
    "SELECT JSONExtract(body, 'Tuple(text String, milliseconds Float64)').text, body::JSON.text FROM payloads "
    "WHERE type = 'TurnGenerated' LIMIT 1",
    "SELECT parts['exact'], mapContains(parts, 'exact'), mapValues(parts), mapExtractKeyLike(parts, 'e%') FROM rewards LIMIT 1",
    "SELECT match(text, '[0-9]+'), extractAllGroups(text, '([a-z])([a-z])'), replaceRegexpOne(text, 'a', 'b'), "
    "multiSearchAllPositions(text, ['a', 'b']), hasTokenCaseInsensitive(text, 'the') FROM turns LIMIT 1",
    "SELECT lengthUTF8(text), substringUTF8(text, 1, 3), reverseUTF8(text), left(text, 3), position(text, 'a'), "
    "startsWith(text, 'a'), trimBoth(text), soundex('x'), base64Encode('x') FROM turns LIMIT 1",
    "SELECT wordShingleMinHash(text), ngramSearchCaseInsensitive(text, 'answer'), "
    "stringJaccardIndex(text, 'a'), damerauLevenshteinDistance"
    "('ab', 'ba') FROM turns LIMIT 1",
    "SELECT ntile(4) OVER (ORDER BY score), percent_rank() OVER (ORDER BY score), dense_rank() OVER (ORDER BY score), "
    "first_value(score) OVER (ORDER BY time), leadInFrame(score, 1, 0.) OVER (ORDER BY time) FROM rewards LIMIT 3",
    "SELECT run_id, score FROM rewards QUALIFY row_number() OVER (PARTITION BY run_id ORDER BY score DESC) <= 2",
    "SELECT r.run_id, b.batch_id FROM (SELECT 1 AS one, run_id FROM runs) AS r CROSS JOIN lineage AS b LIMIT 2",
    "SELECT count() FROM turns AS a SEMI JOIN rewards AS b ON a.attempt_id = b.attempt_id AND a.run_id = b.run_id",
    "SELECT * FROM (SELECT run_id, kind FROM steps) AS s RIGHT JOIN runs AS r ON r.run_id = s.run_id LIMIT 3",
    "SELECT t.run_id FROM turns AS t FULL OUTER JOIN rewards AS r ON t.attempt_id = r.attempt_id LIMIT 3",
    "SELECT run_id FROM runs WHERE run_id NOT IN (SELECT run_id FROM rejects) AND EXISTS (SELECT 1 FROM steps)",
    "SELECT toFloat64OrZero('x'), round(1.23456, 2), roundBankers(2.5), intDiv(7, 2), 7 % 2, greatest(1, 2), clamp(5, 1, 3), "
    "sign(-1), pow(2, 3), log1p(0.), exp2(3), erf(0.), width_bucket(5, 0, 10, 5)",
    "SELECT version(), currentDatabase(), now() > toDateTime('2020-01-01'), today() >= "
    "toDate('2020-01-01'), formatReadableSize(1e9), "
    "formatReadableTimeDelta(3600), formatReadableQuantity(1e6)",
    "EXPLAIN QUERY TREE SELECT run_id, count() FROM events GROUP BY run_id",
    "EXPLAIN json = 1, indexes = 1 SELECT * FROM turns WHERE run_id = 'run-1'",
    "SHOW CREATE VIEW outcomes",
    "DESCRIBE (SELECT run_id, count() AS n FROM events GROUP BY run_id)",
)
